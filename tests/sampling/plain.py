"""The plain way to sample, in double precision with full sorts: the oracle."""

from __future__ import annotations

import numpy as np


def distribution(logits, params, prompt=(), said=(), allowed=None):
    """Probabilities [vocabulary] that a token is drawn with."""
    x = np.array(logits, dtype=np.float64)
    for token in set(prompt) | set(said):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(said):
        x[token] -= params.presence_penalty + params.frequency_penalty * list(said).count(token)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if allowed is not None:
        x[~np.asarray(allowed)] = -np.inf
    if params.temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]
    x = (x - x.max()) / params.temperature
    ranked = sorted(range(len(x)), key=lambda id: (-x[id], id))
    keep = ranked[: params.top_k] if params.top_k else ranked
    p = np.zeros(len(x))
    p[keep] = np.exp(x[keep])
    p /= p.sum()
    if params.top_p < 1:
        mass, kept = 0.0, []
        for id in ranked:
            if mass >= params.top_p:
                break
            kept.append(id)
            mass += p[id]
        p[[id for id in range(len(x)) if id not in set(kept)]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()
