"""Policies with finitely many states, and exact, expected and sampled gradients on them: imports theory."""
