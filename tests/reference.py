"""Algorithm 1, slow and obvious: what the library must equal."""

import torch


def reference_step(model, optimizer, loss_fn, batch, raw, strength, scale, perturbed_names):
    """One step at given raw noise: perturb, backward, restore, update. `raw` maps a parameter's name to its n."""
    clean = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in perturbed_names:
                p.copy_(p + theta(p, raw[name], strength, scale))
    loss = loss_fn(model, batch)
    loss.backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(clean[name])
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def theta(w, n, strength, scale):
    """θ of one parameter: a·n, or filter by filter a·‖wᵢ‖/‖nᵢ‖·nᵢ (dimension 0; each element of a bias)."""
    if scale == "absolute":
        return strength * n
    if w.ndim < 2:
        return n * (strength * w.abs() / n.abs())
    return torch.stack([n_i * (strength * w_i.norm() / n_i.norm()) for w_i, n_i in zip(w, n)])
