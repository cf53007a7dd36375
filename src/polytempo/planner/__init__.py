"""Where to cut a model into stages and how many devices each stage gets, from measured layers."""
