"""Networks and the surgery that turns a pretrained one into the network of any family."""
