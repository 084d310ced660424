"""The courier: one small process per node that stores, publishes and forwards checkpoints. Imports no torch."""
