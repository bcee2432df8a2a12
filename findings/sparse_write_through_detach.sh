#!/usr/bin/env bash
# Question: t is a sparse tensor, as the gradient of nn.Embedding(sparse=True) is. Does t.detach().copy_(other) write
# t?
# A good guess: yes. detach() shares its memory with t, and for a dense tensor this is how one writes without
# autograd.
# What happens: no. t is as before, without an error, and so after detach().mul_() and .add_(): each puts new indices
# and values into the object that detach() has made. t.copy_(other) writes t, and so does detach().copy_() in the CSR
# layout.
# Version: torch 2.13.0.
# Source: aten/src/ATen/native/sparse/SparseTensor.cpp, copy_sparse_, which gives the object that it is called on new
# indices and values. The documentation of torch.Tensor.detach says that a change of either is seen in the other.
# Who meets it: whoever restores, or scales, gradients by .detach() or .data and has sparse ones.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
install() { environment/bin/pip install --quiet --disable-pip-version-check --retries 0 "$@" || exit 2; }
install torch==2.13.0 numpy==2.2.6
cat >program.py <<'END'
import torch


def sparse(place, value):
    return torch.sparse_coo_tensor(torch.tensor([[place]]), torch.tensor([value]), (3,))


def written(write):
    """Whether ``write`` changes a tensor."""
    target = sparse(0, 1.0)
    before = target.to_dense()
    write(target)
    return not torch.equal(target.to_dense(), before)


def csr_is_written():
    rows = torch.eye(2).to_sparse_csr()
    rows.detach().copy_(3 * torch.eye(2).to_sparse_csr())
    return bool(rows.to_dense().sum() == 6)


dense = torch.zeros(3)
dense.detach().copy_(torch.ones(3))
seen = {
    "dense, detach().copy_()": bool(dense.sum() == 3),
    "sparse, copy_()": written(lambda t: t.copy_(sparse(1, 5.0))),
    "sparse, detach().copy_()": written(lambda t: t.detach().copy_(sparse(1, 5.0))),
    "sparse, detach().mul_()": written(lambda t: t.detach().mul_(3.0)),
    "sparse, detach().add_()": written(lambda t: t.detach().add_(sparse(1, 5.0))),
    "CSR, detach().copy_()": csr_is_written(),
}
print(f"torch {torch.__version__}, is it written:")
for name, found in seen.items():
    print(f"  {name}: {found}")
if list(seen.values()) != [True, True, False, False, False, True]:
    raise SystemExit("this torch does otherwise")
print("as described: what detach() returns of a sparse tensor is not written through")
END
environment/bin/python -W ignore program.py
