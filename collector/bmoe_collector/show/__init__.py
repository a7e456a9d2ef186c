"""What a person sees of a run in the terminal, and what a program gets as JSON."""
