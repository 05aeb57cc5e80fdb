"""Built-in group filters; found through the entry-point group `trl_grpo_ext.group_filters`."""
