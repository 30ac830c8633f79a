"""The bounded map: which entry goes, and that threads may share it."""

import threading

from jdist._lru_cache import LRUCache


def test_the_entry_least_recently_used_goes():
    """To be read, set or found again is a use; to be counted or asked for is none."""
    cache = LRUCache(3)
    for key in "abc":
        cache.put(key, key.upper())
    assert cache.get("a") == "A"
    assert cache.get_or_make("b", lambda: "another") == "B"
    assert "c" in cache
    cache.put("d", "D")
    assert [cache.get(key) for key in "abcd"] == ["A", "B", None, "D"]
    cache.put("a", "new")
    cache.put("e", "E")
    assert cache.get("a") == "new"
    assert cache.get("b") is None
    assert len(cache) == 3


def test_entries_can_be_taken_out():
    """By key, and all of them."""
    cache = LRUCache(4)
    for key in (1, 2, 3):
        cache.put(key, object())
    assert cache.pop(2) is not None
    assert cache.pop(2) is None
    assert len(cache) == 2
    cache.clear()
    assert len(cache) == 0
    assert cache.get(3) is None


def test_one_entry_is_made_for_threads_that_come_together():
    """All get the same one, and the bound holds."""
    cache, made, gate = LRUCache(2), [], threading.Barrier(8)

    def ask(number):
        gate.wait(60)
        for turn in range(200):
            key = (turn + number) % 3
            entry = cache.get_or_make(key, lambda key=key: made.append(key) or [key])
            assert entry == [key]
            assert len(cache) <= 2

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert set(made) == {0, 1, 2}
