"""Memory of outputs is lent again when, and only when, nothing refers to it."""

import gc
import threading

import torch

from paceline.cpu.recycle import KEPT, Recycled


def test_an_output_that_is_kept_stays_what_it_was() -> None:
    pool = Recycled()
    kept = [pool.take(2, 5).fill_(i) for i in range(6)]
    part = pool.take(2, 5).fill_(99)[1, 2:]  # a view is a reference too
    for _ in range(6):
        pool.take(2, 5).fill_(-1)
    assert [float(tensor.sum()) for tensor in kept] == [10.0 * i for i in range(6)]
    assert part.tolist() == [99.0] * 3


def test_memory_is_used_again() -> None:
    pool = Recycled()
    seen = set()
    for rows in (4, 1, 3, 2, 4, 4):
        tensor = pool.take(rows, 7)
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((rows, 7), torch.float32, True)
        seen.add(tensor.data_ptr())
        del tensor
    assert len(seen) == 1


def test_only_a_few_blocks_wait() -> None:
    pool = Recycled()
    lent = [pool.take(1, 10) for _ in range(10)]
    lent.clear()
    gc.collect()
    pool.take(1, 10)
    assert len(pool._blocks) <= KEPT


def test_another_thread_may_drop_it() -> None:
    pool = Recycled()
    boxes = [[pool.take(3, 3)] for _ in range(50)]
    threads = [threading.Thread(target=box.clear) for box in boxes]
    for thread in threads:
        thread.start()
    taken = [pool.take(3, 3) for _ in range(50)]
    for thread in threads:
        thread.join()
    assert len({tensor.data_ptr() for tensor in taken}) == 50
