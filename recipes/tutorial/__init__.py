"""What only `configs/smollm2_1.7b_tutorial.yaml` needs: the two rewards of the tutorial that it follows."""
