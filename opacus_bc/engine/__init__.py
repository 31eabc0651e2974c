"""``PrivacyEngine`` and what it sets up, reports on, releases and saves."""
