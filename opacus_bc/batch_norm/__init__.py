"""What happens to running statistics: policies, layers, and who writes buffers."""
