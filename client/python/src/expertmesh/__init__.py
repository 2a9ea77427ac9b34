"""Client of ExpertMesh: Mixture-of-Experts (MoE) layers as a service.

    import numpy as np
    import expertmesh

    with expertmesh.Client("127.0.0.1:7070") as client:
        layer = client.model().layers[0]
        x = np.random.randn(16, layer.hidden_size).astype(np.float32)
        y = client.forward(layer.layer, x).output

`expertmesh.torch` puts remote MoE blocks into models of transformers; it needs torch.
"""

from ._version import __version__
from .client import Client, Cluster, ForwardResult, Layer, Model, Server
from .error import Error

__all__ = [
    "Client",
    "Cluster",
    "Error",
    "ForwardResult",
    "Layer",
    "Model",
    "Server",
    "__version__",
]
