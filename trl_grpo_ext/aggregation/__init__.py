"""Built-in loss aggregations, one file each; found through the group `trl_grpo_ext.loss_aggregations`."""
