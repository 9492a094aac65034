"""What a model looks like to the hierarchy, and how its weights are read."""
