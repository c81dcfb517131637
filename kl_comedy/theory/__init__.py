"""The estimators, one KL configuration and its surrogate, on tensors: imports torch, and no other room."""
