"""How the demo model was made: data, tokenizer, training, evaluation and export. Not part of the installed package."""
