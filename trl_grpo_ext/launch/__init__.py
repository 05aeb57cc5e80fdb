"""Starting and stopping a training: doctor, engine check, safe checkpoints."""
