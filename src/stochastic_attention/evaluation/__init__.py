"""Tasks, budgets and the comparison of attention patterns on a pretrained model."""
