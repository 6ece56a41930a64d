"""One folder a mart: ``defs.yaml`` of the type ``assets.loads.LoadManifest``, and the manifest beside it."""
