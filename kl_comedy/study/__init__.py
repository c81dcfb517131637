"""Runs, sweeps and batches of experiments, and the training inside a run: imports theory, lab, trainers, tasks and policies."""
