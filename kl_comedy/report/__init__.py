"""Figures and judged claims, from recorded runs: imports theory, lab and study."""
