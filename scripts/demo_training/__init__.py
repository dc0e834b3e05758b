"""The parts of scripts/train_demo.py: pictures, prompts, tokenizers, models, training steps."""
