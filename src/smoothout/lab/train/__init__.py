"""Training. `smoothout.lab.train.start.train(config, out)` is the way in."""
