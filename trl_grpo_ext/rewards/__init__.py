"""Built-in rewards, one file each; they are found through the entry-point group `trl_grpo_ext.rewards`."""
