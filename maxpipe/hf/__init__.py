"""Exchange models with Hugging Face: shapes (config.json), tensor names and weights."""
