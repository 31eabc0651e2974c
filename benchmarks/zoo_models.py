"""The networks of the zoo: of every family the variant with the fewest parameters, with random weights."""

from __future__ import annotations

from typing import Any

import timm
import torch
import torchvision
from torch import nn

TORCHVISION = """
    densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 mnasnet0_5 mobilenet_v2
    mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnext50_32x4d shufflenet_v2_x0_5 vgg11_bn
    wide_resnet50_2
"""

# Convolutional families of timm 1.0.31 with BatchNorm. Left out: families whose smallest variant has more
# than 60 million parameters, which one core does not step in a minute, and timm's own test models.
TIMM = """
    bat_resnext26ts convmixer_768_32 cs3darknet_focus_s cspdarknet53 cspnext_tiny cspresnet50 cspresnext50
    darknet17 darknetaa53 densenet121 densenetblur121d dla34 dla46x_c dla60_res2net dpn48b eca_resnet33ts
    eca_resnext26ts eca_vovnet39b ecaresnet26t ecaresnetlight ecaresnext26t_32x4d efficientnet_b0
    efficientnet_blur_b0 efficientnet_cc_b0_4e efficientnet_el_pruned efficientnet_es efficientnet_es_pruned
    efficientnet_h_b5 efficientnet_lite0 efficientnetv2_rw_t efficientvim_m1 ese_vovnet19b_dw fasternet_t0
    fastvit_t8 fbnetc_100 fbnetv3_b gc_efficientnetv2_rw_t gcresnet33ts gcresnext26ts gernet_s ghostnet_050
    ghostnetv2_100 ghostnetv3_050 hardcorenas_b hgnet_tiny hgnetv2_b0 hrnet_w18_small iformer_t
    inception_next_atto inception_resnet_v2 inception_v3 inception_v4 lcnet_035 lcnetv2_small
    legacy_seresnet18 legacy_seresnext26_32x4d legacy_xception mixnet_s mnasnet_small mobilenet_edgetpu_100
    mobilenet_edgetpu_v2_xs mobilenetv1_100 mobilenetv2_035 mobilenetv3_small_050 mobilenetv4_conv_small_035
    mobileone_s1 regnetv_040 regnetx_002 regnety_002 regnetz_005 repghostnet_050 repvgg_a0 repvit_m1
    res2net50_48w_2s res2next50 resnest14d resnet10t resnet14t resnet18 resnet18d resnet26 resnetaa34d
    resnetblur18 resnetrs50 resnetv2_18 resnext26ts resnext50_32x4d rexnet_100 rexnetr_100 sedarknet21
    selecsls42 semnasnet_050 seresnet18 seresnetaa50d seresnext26ts shvit_s1 skresnet18 skresnext50_32x4d
    spnasnet_100 starnet_s050 tf_efficientnet_b0 tf_efficientnet_cc_b0_4e tf_efficientnet_lite0
    tf_efficientnetv2_b0 tf_mixnet_s tf_mobilenetv3_small_075 tinynet_e tresnet_m tresnet_v2_l vovnet39a
    xception41 xception41p
"""

# Not counted among timm's CNNs with BatchNorm: attention besides convolutions, or no BatchNorm.
OTHERS = """
    cpubone_nano eca_halonext26ts fastvit_sa12 halonet26t lambda_resnet26t lowformer_b0 mobilevit_xxs
    mobilevitv2_050 nextvit_small tiny_vit_5m_224 convnext_atto eca_nfnet_l0 nf_regnet_b0 nf_resnet26
    resnetv2_50x1_bit
"""

# One or two of each kind, whose noise-free release is compared with a loop over single samples.
WITH_ORACLE = """
    timm:bat_resnext26ts timm:dla46x_c timm:ecaresnet26t timm:fasternet_t0 timm:inception_next_atto
    timm:lcnet_035 timm:mobilenetv4_conv_small_035 timm:nf_regnet_b0 timm:repghostnet_050 timm:resnest14d
    timm:resnetblur18 timm:resnetv2_18 timm:starnet_s050 timm:tf_efficientnet_lite0 torchvision:densenet121
    torchvision:efficientnet_b0 torchvision:mnasnet0_5 torchvision:resnet18 torchvision:shufflenet_v2_x0_5
"""

OPTIONS: dict[str, dict[str, Any]] = {
    # Their auxiliary classifiers need 224 pixels or more; without them the families fit into small images.
    "torchvision inception_v3": {"aux_logits": False, "init_weights": True},
    "torchvision googlenet": {"aux_logits": False, "init_weights": True},
}


def names() -> list[str]:
    """All networks, as ``library name``."""
    groups = (("torchvision", TORCHVISION), ("timm", TIMM), ("timm", OTHERS))
    return [f"{library} {name}" for library, listed in groups for name in listed.split()]


def with_oracle() -> set[str]:
    """The networks whose release is compared with an oracle's, as ``library name``."""
    return {entry.replace(":", " ") for entry in WITH_ORACLE.split()}


def build(network: str, classes: int) -> nn.Module:
    """The network with random weights, the same ones at every call."""
    library, name = network.split()
    torch.manual_seed(0)
    if library == "torchvision":
        options = OPTIONS.get(network, {})
        model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes, **options)
        return model
    return timm.create_model(name, pretrained=False, num_classes=classes)
