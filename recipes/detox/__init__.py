"""What only the detox recipe needs: prompts, KL measured and logged, its plot."""
