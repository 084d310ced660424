"""Bringing up agents on the other machines of a bare cluster, over ssh or with DeepSpeed's own runner."""
