"""What to quantize and how, as data (TOML); see docs/recipes.md for the grammar."""
