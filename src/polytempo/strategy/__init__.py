"""One declaration of how a model is spread over ranks: data, pipeline and tensor parallelism."""
