"""TRL trainers with any KL configuration: imports theory and lab."""
