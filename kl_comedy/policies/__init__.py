"""Small language models: building, sampling, evaluating and pretraining them: imports theory and tasks."""
