"""Needs: the labels that a worker must have for a ticket, and the model that it asks for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from duplane.fabric.v1 import lease_pb2, registry_pb2

Labels = frozenset[tuple[str, str]]
"""Names and values of labels."""

MODEL = "model"  # the label that names the model of a worker


@dataclass(frozen=True, slots=True)
class Needs:
    """What a ticket needs: labels, and the model that it asks for by name; empty means any.

    `SlotIndex` decides what the name of the model means, because this depends on the workers.
    """

    labels: Labels = frozenset()
    model: str = ""

    def __str__(self) -> str:
        named = [("model asked for", self.model)] if self.model else []
        return "".join(f" with {name}={value}" for name, value in (*sorted(self.labels), *named))


NO_NEEDS = Needs()


def needs_of(request: lease_pb2.AcquireLeaseRequest) -> Needs:
    """Return the needs of a request."""
    if not request.needs and not request.model:
        return NO_NEEDS
    return Needs(frozenset(request.needs.items()), request.model)


def demand_of(
    request: lease_pb2.AcquireLeaseRequest,
) -> tuple[str, lease_pb2.SessionKind, Needs]:
    """Return what decides which slots a request can use: its pool, its kind and its needs."""
    return request.pool, request.kind, needs_of(request)


def labels_of(register: registry_pb2.Register) -> Labels:
    """Return the labels of a worker."""
    return frozenset(register.labels.items())


def model_of(labels: Labels) -> str:
    """Return the model that labels name; empty if they name none."""
    return next((value for name, value in labels if name == MODEL), "")


def with_model(labels: Labels, model: str) -> Labels:
    """Return `labels` with another value of the label `model`."""
    return frozenset(label for label in labels if label[0] != MODEL) | {(MODEL, model)}
