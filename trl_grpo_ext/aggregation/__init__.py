"""Built-in loss aggregations, by family; found through the entry-point group `trl_grpo_ext.loss_aggregations`."""
