"""What tests share: engines that misbehave on cue, and a gateway without Ray."""
