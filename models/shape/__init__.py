"""The shape of a model: its sizes, its family, and the config.json that states both."""
