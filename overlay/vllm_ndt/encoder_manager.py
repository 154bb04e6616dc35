# SPDX-License-Identifier: Apache-2.0
"""Upstream's encoder cache manager, with a door that keeps a place in the queue, and with counts for the metrics."""

from collections import OrderedDict
from enum import Enum

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

# How many evicted items are remembered, to tell an encoder run that is a repetition from a first one.
REMEMBERED = 10_000


class Refusal(Enum):
    """Why an item got no place in the cache."""

    COMPUTE = "the encoder's budget of this step is used up"
    SPACE = "other items hold the cache"
    DOOR = "an earlier request waits for space"


class Manager(EncoderCacheManager):
    """Decides, evicts and frees as upstream's does, as long as the door is open.

    When a request gets no token for want of space, the scheduler closes the door until the step's end: requests
    behind it keep what they hold and take nothing more, so that what they give back reaches the one that waits.

    `refusal` and `refused` are the reason and the size of the last refusal. `evictions` and `repeats` only grow; the
    latter counts encoder runs for an item that is among the last REMEMBERED evicted ones. Sizes are in embeddings.
    """

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self.door_open = True
        self.refusal: Refusal | None = None
        self.refused = 0
        self.evictions = 0
        self.repeats = 0
        self._evicted: OrderedDict[str, None] = OrderedDict()
        self._tainted: set[str] = set()

    @property
    def used(self) -> int:
        """What the entries take, referenced or not."""
        return self.cache_size - self.num_free_slots

    @property
    def pinned(self) -> int:
        """What the referenced entries take."""
        return self.cache_size - self.num_freeable_slots

    def pinned_by(self, request: Request) -> int:
        """What the items take that `request` references; one that stands twice in it may count twice."""
        return sum(
            request.get_num_encoder_embeds(input_id)
            for input_id in self.get_cached_input_ids(request)
            if self._holds(request, input_id)
        )

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """As upstream's; behind a closed door, or if tainted, only for an item that `request` references already."""
        if not self._holds(request, input_id) and (not self.door_open or self._taints(request, input_id)):
            return False
        return super().check_and_update_cache(request, input_id)

    def can_allocate(
        self, request: Request, input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        """As upstream's; never behind a closed door. `refusal` and `refused` tell of a refusal."""
        self.refused = request.get_num_encoder_embeds(input_id)
        if not self.door_open:
            self.refusal = Refusal.DOOR
            return False
        if self._taints(request, input_id):
            self.refusal = Refusal.SPACE
            return False
        before = len(self.freed)
        if super().can_allocate(request, input_id, encoder_compute_budget, num_embeds_to_schedule):
            for item in self.freed[before:]:
                self._note_eviction(item)
            return True
        self.refusal = Refusal.COMPUTE if self.refused > encoder_compute_budget else Refusal.SPACE
        return False

    def allocate(self, request: Request, input_id: int) -> None:
        """As upstream's; an item that was evicted before counts as a repeated encoder run."""
        super().allocate(request, input_id)
        item = request.mm_features[input_id].identifier
        self._tainted.discard(item)
        if item in self._evicted:
            del self._evicted[item]
            self.repeats += 1

    def forget(self, request: Request, input_id: int) -> None:
        """Drop an entry whose encoder run was called off, whoever references it.

        Upstream leaves it, and the next request with this item would look for an output that no worker has.
        """
        item = request.mm_features[input_id].identifier
        if item not in self.cached:
            return
        size = request.get_num_encoder_embeds(input_id)
        self.num_free_slots += size
        if self.freeable.pop(item, None) is None:
            self.num_freeable_slots += size
        del self.cached[item]
        self._tainted.discard(item)

    def reset(self) -> None:
        """As upstream's; what was evicted or tainted before says nothing of new weights."""
        super().reset()
        self._tainted.clear()
        self._evicted.clear()

    def taint(self, request: Request) -> None:
        """Serve none of the request's entries to another: they go now, or once those that have them let go."""
        for input_id, feature in enumerate(request.mm_features):
            if self.cached.get(feature.identifier):
                self._tainted.add(feature.identifier)
            elif feature.identifier in self.cached:
                self._expel(feature.identifier, request.get_num_encoder_embeds(input_id))

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """As upstream's; a tainted entry goes with its last reference."""
        super().free_encoder_input(request, input_id)
        item = request.mm_features[input_id].identifier
        if item in self._tainted and not self.cached.get(item):
            self._tainted.discard(item)
            if item in self.cached:
                self._expel(item, request.get_num_encoder_embeds(input_id))

    def _expel(self, item: str, size: int) -> None:
        """Evict an entry that nobody references; workers drop it with the next step."""
        self.freeable.pop(item, None)
        self.cached.pop(item)
        self.num_free_slots += size
        self.freed.append(item)

    def _taints(self, request: Request, input_id: int) -> bool:
        item = request.mm_features[input_id].identifier
        return item in self._tainted and item in self.cached

    def _holds(self, request: Request, input_id: int) -> bool:
        item = request.mm_features[input_id].identifier
        return request.request_id in self.cached.get(item, ())

    def _note_eviction(self, item: str) -> None:
        self.evictions += 1
        self._evicted[item] = None
        self._evicted.move_to_end(item)
        if len(self._evicted) > REMEMBERED:
            self._evicted.popitem(last=False)
