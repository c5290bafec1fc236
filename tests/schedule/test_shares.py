"""Fair shares: order, lifting, forgetting; and that a flood does not starve anybody."""

from headwater.request import Generation, SamplingParams
from headwater.schedule.kinds.request import Request
from headwater.schedule.scheduler import Phase
from headwater.schedule.workload import MAX_IDLE_TENANTS, Queue, Shares
from tests.schedule.ledger import Lab, words


def seq(number: int, namespace: str, length: int = 10, **key) -> Request:
    return Request(number, Generation(tuple(range(length)), SamplingParams(), namespace, **key))


def ids(ordered) -> list[int]:
    return [s.id for s in ordered]


def test_one_namespace_is_served_in_order_of_arrival():
    assert ids(Shares().order([seq(3, "a"), seq(1, "a"), seq(2, "a")])) == [1, 2, 3]


def test_namespaces_take_turns_by_tokens():
    flood = [seq(i, "a", 10) for i in range(1, 5)]
    assert ids(Shares().order([*flood, seq(9, "b", 30), seq(10, "b", 30)])) == [1, 9, 2, 3, 4, 10]


def test_namespace_with_least_service_is_first():
    shares = Shares()
    shares.join("a")
    shares.join("b")
    shares.charge("a", 5)
    assert ids(shares.order([seq(1, "a"), seq(2, "b")])) == [2, 1]


def test_idle_namespace_saves_no_credit():
    shares = Shares()
    shares.join("a")
    shares.charge("a", 1000)
    shares.join("b")  # comes when a has had 1,000
    shares.charge("b", 1)
    assert ids(shares.order([seq(1, "a"), seq(2, "b")])) == [1, 2]


def test_newcomer_after_a_pause_owes_as_much_as_the_last_to_leave():
    shares = Shares()
    shares.join("a")
    shares.charge("a", 1_000_000)
    shares.leave("a")
    shares.join("flood")  # a name that nobody had before is no way past the others
    shares.join("a")
    shares.charge("flood", 1)
    assert ids(shares.order([seq(1, "flood"), seq(2, "flood"), seq(3, "a")])) == [3, 1, 2]


def test_a_debt_outlives_a_pause():
    shares = Shares()
    shares.join("a")
    shares.join("b")
    shares.charge("a", 1000)
    shares.leave("a")
    shares.join("a")
    assert ids(shares.order([seq(1, "a"), seq(2, "b")])) == [2, 1]


def test_key_with_twice_the_share_is_served_twice_the_tokens():
    lab = Lab(n_pages=2000, max_running=2, tokens_per_step=16)
    share = {"a": 2.0, "b": 1.0}
    for i in range(40):
        for key in share:
            lab.submit(words(60, key, i), 4, namespace=f"{key}/{i}", key=key, share=share[key])
    done = {key: 0 for key in share}
    while not done["a"]:
        lab.step()
        done["a"] = not any(s.tenant == "a" for s in lab.scheduler.waiting)
    left = sum(s.tenant == "b" for s in lab.scheduler.waiting)
    assert 15 <= left <= 25  # of 40, when all 40 of the other key have begun


def test_salts_of_one_key_are_one_tenant():
    flood = [seq(i, f"a/{i}", key="a") for i in range(1, 5)]
    assert ids(Shares().order([*flood, seq(9, "b", 30, key="b")])) == [1, 9, 2, 3, 4]


def test_counters_of_idle_namespaces_are_bounded():
    shares = Shares()
    for i in range(3 * MAX_IDLE_TENANTS):
        shares.join(str(i))
        shares.charge(str(i), 1)
        shares.leave(str(i))
    assert len(shares) == MAX_IDLE_TENANTS


def test_full_queue_displaces_the_last_request_of_the_longest_namespace():
    queue = Queue()
    for s in [seq(1, "a"), seq(2, "a"), seq(3, "b"), seq(4, "a")]:
        queue.push(s)
    assert queue.displaced_by("c").id == 4
    assert queue.displaced_by("b").id == 4
    assert queue.displaced_by("a") is None


def test_request_with_a_begun_answer_is_not_displaced():
    queue = Queue()
    for s in [seq(1, "a"), seq(2, "a")]:
        s.preemptions = 1
        queue.push(s)
    assert queue.displaced_by("b") is None


def test_a_flood_of_one_namespace_does_not_starve_another():
    lab = Lab(n_pages=2000, max_running=4, tokens_per_step=64)
    flood = [lab.submit(words(200, i), 500, namespace="flood") for i in range(40)]
    for _ in range(30):
        lab.step()
    assert sum(s.phase is Phase.DECODE for s in flood) == 4  # all places are taken, for hundreds of steps
    small = lab.submit(words(50, "small"), 4, namespace="small")
    steps = lab.steps
    while small.phase is not Phase.DONE:
        lab.step()
    assert lab.steps - steps <= 6  # the guest's place is free: one step of prefill, four of decode
    assert not any(s.phase is Phase.DONE for s in flood)


def test_a_namespace_that_runs_is_nobodys_guest():
    lab = Lab(n_pages=2000, max_running=4, tokens_per_step=64)
    for i in range(10):
        lab.submit(words(20, i), 100, namespace="flood")
    small = [lab.submit(words(50, "small", i), 50, namespace="small") for i in range(3)]
    for _ in range(20):
        lab.step()
        assert len(lab.scheduler.running) <= 5
        assert sum(s.phase is not Phase.WAITING for s in small) <= max(1, len(lab.scheduler.running) - 3)
    lab.run()
