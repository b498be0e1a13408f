"""Plans: which bytes of a source go where, with a proof that they cover the model. Pure: no payload, no collectives."""
