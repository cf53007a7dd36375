"""A model that several processes train together, each a part of it: the schedules of `pipeline`, carried out."""
