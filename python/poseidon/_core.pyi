"""
Poseidon's core: plan, client and server (contracts: include/poseidon/*.h)
"""

import enum
from collections.abc import Sequence
from typing import Any, Protocol

class _Array(Protocol):
    """An array in the host's memory, in C order, that DLPack can hand over."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

def set_leak_warnings(on: bool) -> None:
    """
    Whether the end of the process prints which objects of this module it has not freed. Tests turn it on.
    """

class Options:
    """Every setting of the core; timeout in seconds."""

    def __init__(self, **kwargs: Any) -> None: ...
    @property
    def rank(self) -> Any:
        """
        Number of this worker, from 0. With on_failure=shrink it is the worker's slot, and the rank in each generation is the worker's place among those that take part.
        """

    @rank.setter
    def rank(self, arg: object, /) -> None: ...
    @property
    def world_size(self) -> Any:
        """Number of workers. With on_failure=shrink it is the number of slots."""

    @world_size.setter
    def world_size(self, arg: object, /) -> None: ...
    @property
    def master_addr(self) -> Any:
        """Address of rank 0's machine, where all ranks meet."""

    @master_addr.setter
    def master_addr(self, arg: object, /) -> None: ...
    @property
    def master_port(self) -> Any:
        """Port on rank 0's machine where all ranks meet."""

    @master_port.setter
    def master_port(self, arg: object, /) -> None: ...
    @property
    def generation(self) -> Any:
        """
        The last generation (Client::generation) that this process was part of; 0: none.
        """

    @generation.setter
    def generation(self, arg: object, /) -> None: ...
    @property
    def run(self) -> Any:
        """
        What the launcher calls this run of the job, equal for all its processes and for no other run's; empty: nothing.
        """

    @run.setter
    def run(self, arg: object, /) -> None: ...
    @property
    def job(self) -> Any:
        """Name of the job. Workers of different jobs never talk to each other."""

    @job.setter
    def job(self, arg: object, /) -> None: ...
    @property
    def secret(self) -> Any:
        """
        What all processes of the job prove to know before anything else is said (SECURITY.md), at least 16 bytes. Empty: whoever can connect is let in. One a line: a dedicated server takes all of them, a worker proves the first.
        """

    @secret.setter
    def secret(self, arg: object, /) -> None: ...
    @property
    def tls(self) -> Any:
        """
        TLS 1.3 on every TCP connection, with keys made from the secret. All processes and servers must say the same. Shared memory is not encrypted.
        """

    @tls.setter
    def tls(self, arg: object, /) -> None: ...
    @property
    def timeout(self) -> Any:
        """
        Time after which waiting for another process is an error. All other deadlines are derived from it.
        """

    @timeout.setter
    def timeout(self, arg: object, /) -> None: ...
    @property
    def late_timeout(self) -> Any:
        """
        How long a process is waited for that runs and is late, if that is longer than `timeout`.
        """

    @late_timeout.setter
    def late_timeout(self, arg: object, /) -> None: ...
    @property
    def transport(self) -> Any:
        """
        What carries messages: the best for each pair of processes, or the same for all.
        """

    @transport.setter
    def transport(self, arg: object, /) -> None: ...
    @property
    def interfaces(self) -> Any:
        """
        Addresses or devices of this host to listen on. Server cores take them in turn. Other workers connect to the first. Without any, a worker listens on the address that leads to MASTER_ADDR, and `poseidon server` on 127.0.0.1.
        """

    @interfaces.setter
    def interfaces(self, arg: object, /) -> None: ...
    @property
    def flows(self) -> Any:
        """Connections from each worker to each server core."""

    @flows.setter
    def flows(self, arg: object, /) -> None: ...
    @property
    def coding(self) -> Any:
        """
        Whether the values of large messages travel in fewer bytes, which every bit survives (docs/coding.md).
        """

    @coding.setter
    def coding(self, arg: object, /) -> None: ...
    @property
    def reduce_by_host(self) -> Any:
        """
        Workers of one machine add up their gradients among themselves first, and one of them exchanges the sum.
        """

    @reduce_by_host.setter
    def reduce_by_host(self, arg: object, /) -> None: ...
    @property
    def rack(self) -> Any:
        """
        A label. Workers of one rack add up their gradients among themselves first, so that less crosses the racks' uplinks (docs/hosts.md). All workers have one, or none.
        """

    @rack.setter
    def rack(self, arg: object, /) -> None: ...
    @property
    def machine(self) -> Any:
        """
        A label. Workers of one machine that have different labels count as workers of different machines.
        """

    @machine.setter
    def machine(self, arg: object, /) -> None: ...
    @property
    def worker_cores(self) -> Any:
        """
        Loops that move a worker's bytes, where its port is faster than one processor core. With 0 its own loop moves them.
        """

    @worker_cores.setter
    def worker_cores(self, arg: object, /) -> None: ...
    @property
    def servers(self) -> Any:
        """
        Addresses of dedicated servers. Without any, every worker hosts a server.
        """

    @servers.setter
    def servers(self, arg: object, /) -> None: ...
    @property
    def server_cores(self) -> Any:
        """
        Threads of each server. Each has its own chunks, and there is at least one for each interface. With 0 and at most one interface, an embedded server runs on the worker's communication thread; a dedicated server has one thread.
        """

    @server_cores.setter
    def server_cores(self, arg: object, /) -> None: ...
    @property
    def compute_threads(self) -> Any:
        """Threads that multiply factors."""

    @compute_threads.setter
    def compute_threads(self, arg: object, /) -> None: ...
    @property
    def revise(self) -> Any:
        """What becomes of the schemes that "auto" has chosen."""

    @revise.setter
    def revise(self, arg: object, /) -> None: ...
    @property
    def chunk_bytes(self) -> Any:
        """
        Largest piece of a tensor that one server core holds. Pieces are smaller where many workers share a dedicated server. With auto the fastest size is measured at the start.
        """

    @chunk_bytes.setter
    def chunk_bytes(self, arg: object, /) -> None: ...
    @property
    def small_bytes(self) -> Any:
        """Largest tensor that is exchanged in a group."""

    @small_bytes.setter
    def small_bytes(self, arg: object, /) -> None: ...
    @property
    def group_bytes(self) -> Any:
        """Size at which a group of small tensors is closed."""

    @group_bytes.setter
    def group_bytes(self, arg: object, /) -> None: ...
    @property
    def priority_classes(self) -> Any:
        """
        Flows between each pair of peers, by urgency. Their marks let the network tell them apart (Geryon §III-A).
        """

    @priority_classes.setter
    def priority_classes(self, arg: object, /) -> None: ...
    @property
    def dscp(self) -> Any:
        """
        Code points that mark the classes, the most urgent first. The code point 0 leaves packets unmarked.
        """

    @dscp.setter
    def dscp(self, arg: object, /) -> None: ...
    @property
    def stragglers(self) -> Any:
        """What a step does about workers that come late."""

    @stragglers.setter
    def stragglers(self, arg: object, /) -> None: ...
    @property
    def straggler_factor(self) -> Any:
        """
        With stragglers=drop: how many deviations after the median worker a step ends.
        """

    @straggler_factor.setter
    def straggler_factor(self, arg: object, /) -> None: ...
    @property
    def straggler_steps(self) -> Any:
        """
        With stragglers=drop: a worker that is this many steps behind is waited for.
        """

    @straggler_steps.setter
    def straggler_steps(self, arg: object, /) -> None: ...
    @property
    def consistency(self) -> Any:
        """Whom a worker waits for where servers update."""

    @consistency.setter
    def consistency(self, arg: object, /) -> None: ...
    @property
    def staleness(self) -> Any:
        """
        With consistency=ssp: how many steps a worker may be ahead of the slowest one.
        """

    @staleness.setter
    def staleness(self, arg: object, /) -> None: ...
    @property
    def on_failure(self) -> Any:
        """What the other workers do when one is lost."""

    @on_failure.setter
    def on_failure(self, arg: object, /) -> None: ...
    @property
    def min_workers(self) -> Any:
        """
        With on_failure=shrink: the least number of workers with which a job begins and goes on. Fewer wait for more. Those that come later are taken in, up to the number of workers. With 0 a job begins with all, and goes on with one.
        """

    @min_workers.setter
    def min_workers(self, arg: object, /) -> None: ...
    @property
    def replica_check(self) -> Any:
        """
        How often the ranks compare a digest of their parameters, which have to be equal: every N steps. With auto they do so after steps 2 and 10, and then as seldom as it takes to cost at most a thousandth of the time (docs/errors.md).
        """

    @replica_check.setter
    def replica_check(self, arg: object, /) -> None: ...
    @property
    def flight_record(self) -> Any:
        """
        Directory for flight records, which say what a process knew when its job failed (docs/flight-records.md). With off none are written.
        """

    @flight_record.setter
    def flight_record(self, arg: object, /) -> None: ...
    @property
    def memory_limit(self) -> Any:
        """
        Maximum memory of one job on one server. With 0 the job has no limit of its own.
        """

    @memory_limit.setter
    def memory_limit(self, arg: object, /) -> None: ...
    @property
    def server_memory(self) -> Any:
        """
        Maximum memory of all jobs together on one server. With 0 there is no limit; for `poseidon server` it is half of the machine's memory.
        """

    @server_memory.setter
    def server_memory(self, arg: object, /) -> None: ...
    @property
    def rate_limit(self) -> Any:
        """
        Maximum bytes a second of one job on one server, in each direction. With 0 there is no limit.
        """

    @rate_limit.setter
    def rate_limit(self, arg: object, /) -> None: ...
    @property
    def max_jobs(self) -> Any:
        """Maximum concurrent jobs per secret on a dedicated server."""

    @max_jobs.setter
    def max_jobs(self, arg: object, /) -> None: ...
    @property
    def checkpoint_dir(self) -> Any:
        """
        Directory, shared by all servers of a job, where they save parameters and optimizer state. Without one nothing is saved.
        """

    @checkpoint_dir.setter
    def checkpoint_dir(self, arg: object, /) -> None: ...
    @property
    def checkpoint_every(self) -> Any:
        """Steps from one checkpoint to the next."""

    @checkpoint_every.setter
    def checkpoint_every(self, arg: object, /) -> None: ...
    @property
    def checkpoint_keep(self) -> Any:
        """Complete checkpoints that are kept."""

    @checkpoint_keep.setter
    def checkpoint_keep(self, arg: object, /) -> None: ...
    @property
    def schedule(self) -> Any:
        """When a layer's exchange starts."""

    @schedule.setter
    def schedule(self, arg: object, /) -> None: ...
    @property
    def partition(self) -> Any:
        """How tensors are spread over the shards."""

    @partition.setter
    def partition(self, arg: object, /) -> None: ...
    @property
    def aggregation(self) -> Any:
        """When a server adds up what its workers send."""

    @aggregation.setter
    def aggregation(self, arg: object, /) -> None: ...
    @property
    def reduce_order(self) -> Any:
        """In which order the workers' parts are added."""

    @reduce_order.setter
    def reduce_order(self, arg: object, /) -> None: ...
    @property
    def assignment(self) -> Any:
        """What a server core is responsible for."""

    @assignment.setter
    def assignment(self, arg: object, /) -> None: ...

def option_rows() -> list:
    """The rows of poseidon/options.def, in their order, as dicts."""

def option_groups() -> dict:
    """Name of each group of options to its title and a sentence on it."""

def tls_available() -> bool:
    """Whether this build has OpenSSL, which tls=on needs."""

class Store:
    """
    Where the processes of a job find each other (include/poseidon/store.h).
    """

def open_store(options: Options) -> Store:
    """The store at master_addr:master_port, for all generations of a job."""

def generation_wanted(store: object, job: str) -> int:
    """The highest generation of the job that some process has asked for."""

def note_left(store: object, job: str, generation: int, slot: int) -> None:
    """
    Notes that the process in this slot leaves the generation for good: nobody waits for it in the next one.
    """

def last_refused(store: object, job: str) -> str:
    """The last process that was refused, and why; empty if there is none."""

class Cluster:
    """P1 workers, P2 servers and where the servers are."""

    def __init__(
        self, worker_count: int, server_count: int, placement: str = "colocated", hosts: Sequence[int] = []
    ) -> None:
        """
        `hosts` has the machine of each worker, if workers of one machine add up among themselves.
        """

    @property
    def hosts(self) -> list[int]: ...
    @property
    def racks(self) -> list[int]: ...
    @property
    def worker_count(self) -> int: ...
    @property
    def server_count(self) -> int: ...
    @property
    def placement(self) -> str: ...

class Layer:
    """One tensor to synchronize."""

    def __init__(
        self,
        name: str,
        dtype: str,
        element_count: int,
        rows: int = 0,
        cols: int = 0,
        scheme: str = "auto",
        stored: bool = False,
    ) -> None:
        """
        Without an update of its own, a wire format or what else wished_layer() gives.
        """

    @property
    def kept_count(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def element_count(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def scheme(self) -> str: ...
    @property
    def stored(self) -> bool: ...
    @property
    def whole(self) -> bool: ...
    @property
    def wire(self) -> str: ...
    @property
    def parameter_wire(self) -> str: ...
    @property
    def lossy(self) -> str: ...
    @property
    def factor_wire(self) -> str: ...
    @property
    def topk_fraction(self) -> float: ...
    @property
    def powersgd_rank(self) -> int: ...
    @property
    def matrix_rows(self) -> int: ...
    @property
    def may_lose(self) -> bool: ...
    @property
    def row_gradient(self) -> bool: ...
    @property
    def zeros_are_missing(self) -> bool: ...
    @property
    def factorable(self) -> bool: ...
    @property
    def size_bytes(self) -> int: ...

class LayerTerms:
    """What a layer may do in a job, and how."""

    @property
    def scheme(self) -> str: ...
    @property
    def schemes(self) -> list[str]: ...
    @property
    def uses_factors(self) -> bool: ...
    @property
    def grouped(self) -> bool: ...
    def wire(self, layer: Layer) -> str:
        """The format in which the dense gradient of this layer travels."""

    def factor_wire(self, layer: Layer) -> str:
        """The format in which its factors travel, and the values of its rows."""

    @property
    def bytes_per_value(self) -> float: ...
    @property
    def bytes_per_factor(self) -> float: ...
    @property
    def kept_count(self) -> int: ...
    @property
    def reason(self) -> str: ...

def wished_layer(facts: object, wishes: object, options: Options) -> Layer:
    """The layer that a tensor becomes."""

def layer_terms(layer: Layer, cluster: Cluster, options: Options) -> LayerTerms:
    """The terms of a layer of a plan."""

def settled_scheme(layer: Layer, counts: Sequence[int], cluster: Cluster, options: Options) -> str:
    """What "auto" is for good, if the ranks have these numbers of factors."""

def automatic_schemes(layer: Layer, cluster: Cluster) -> list[str]:
    """The schemes among which "auto" chooses for the layer."""

class SchemeTraits:
    """What a scheme accepts and whom it needs (scheme.h)."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def takes_factors(self) -> bool: ...
    @property
    def takes_rows(self) -> bool: ...
    @property
    def workers_multiply(self) -> bool: ...
    @property
    def only_one_worker(self) -> bool: ...
    @property
    def converts(self) -> bool: ...
    @property
    def lossy(self) -> bool: ...
    @property
    def uses_servers(self) -> bool: ...
    @property
    def can_drop_late(self) -> bool: ...
    @property
    def automatic(self) -> bool: ...
    @property
    def one_way_at_a_time(self) -> bool: ...
    @property
    def baseline(self) -> bool: ...

def schemes() -> list[SchemeTraits]:
    """All schemes, in the order in which they are registered."""

class SchemeCost:
    """Numbers per node and step, sent plus received (Poseidon Table 1)."""

    @property
    def worker(self) -> float: ...
    @property
    def server(self) -> float: ...
    @property
    def server_and_worker(self) -> float: ...
    def busiest(self, cluster: Cluster) -> float: ...

def scheme_cost(scheme: str, rows: int, cols: int, factor_count: float, cluster: Cluster) -> SchemeCost: ...
def scheme_multiply_adds(scheme: str, rows: int, cols: int, factor_count: float, cluster: Cluster) -> float:
    """Multiply-adds of the busiest process from the last part to the result."""

def layer_cost(layer: Layer, scheme: str, factor_count: float, cluster: Cluster) -> SchemeCost: ...

class Chunk:
    """A slice of a unit and the shard that owns it."""

    @property
    def index(self) -> int: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def server(self) -> int: ...
    @property
    def core(self) -> int: ...
    @property
    def flow(self) -> int: ...

class Unit:
    """What is exchanged as one: a layer, or a group of small ones."""

    @property
    def id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def layers(self) -> list[int]: ...
    @property
    def chunks(self) -> list[Chunk]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def bytes_per_value(self) -> float: ...
    @property
    def bytes_per_factor(self) -> float: ...
    @property
    def grouped(self) -> bool: ...

class Plan:
    """Immutable; identical on every rank."""

    @property
    def cluster(self) -> Cluster: ...
    @property
    def layers(self) -> list[Layer]: ...
    @property
    def terms(self) -> list[LayerTerms]: ...
    @property
    def units(self) -> list[Unit]: ...
    @property
    def unit_of_layer(self) -> list[int]: ...
    @property
    def server_bytes(self) -> list[int]: ...
    def lines(self) -> list[str]: ...

def best_scheme(layer: Layer, factor_count: float, cluster: Cluster) -> str: ...

MESSAGE_HEADER_BYTES: int = 64

def priority_class(urgency: float, threshold: float, class_count: int) -> int: ...
def make_plan(layers: Sequence[Layer], cluster: Cluster, options: Options, first_unit_id: int = 0) -> Plan: ...

class CheckpointListing:
    """One version of a job's server checkpoints."""

    @property
    def job(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def run(self) -> int: ...
    @property
    def file_count(self) -> int: ...
    @property
    def unit_count(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def complete(self) -> bool: ...
    @property
    def problem(self) -> str: ...

NO_VERSION: int = 18446744073709551615

def list_checkpoints(directory: str, verify: bool = False) -> list[CheckpointListing]: ...

class UpdateRule:
    """
    How servers update a layer (include/poseidon/update.h). The keywords are the values of the kind. `aggregator` is the name of what reduces the ranks' contributions (include/poseidon/aggregate.h); the servers have to know it.
    """

    def __init__(self, kind: str, *, keeps_gradient: bool = False, aggregator: str = "sum", **values: Any) -> None: ...
    @property
    def state_count(self) -> int: ...
    def __eq__(self, arg: object, /) -> bool: ...

GRADIENT_ARRAY: int = 5

class LayerStats:
    """How a layer's last exchange went; times of time.monotonic_ns()."""

    @property
    def scheme(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def present(self) -> bool: ...
    @property
    def factor_count(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...
    @property
    def late(self) -> bool: ...
    @property
    def behind(self) -> int: ...
    @property
    def update_count(self) -> int: ...
    @property
    def oldest_version(self) -> int: ...
    @property
    def newest_version(self) -> int: ...
    @property
    def started_ns(self) -> int: ...
    @property
    def completed_ns(self) -> int: ...
    @property
    def compute_ns(self) -> int:
        """Of these, at the end: products or sums of the parts."""

class LateRank:
    """A rank that steps have been completed without (stragglers=drop)."""

    @property
    def rank(self) -> int: ...
    @property
    def late_steps(self) -> int:
        """
        Steps in which at least one chunk was completed without it; of another rank at least so many.
        """

    @property
    def late_chunks(self) -> int: ...
    @property
    def last_step(self) -> int:
        """The last of these steps."""

class TrafficStats:
    """Network bytes of this process since connect."""

    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...
    @property
    def plain_bytes_sent(self) -> int: ...
    @property
    def plain_bytes_received(self) -> int: ...

class ReduceOp(enum.Enum):
    sum = 1

    product = 2

    min = 3

    max = 4

    band = 5

    bor = 6

    bxor = 7

class Element(enum.Enum):
    float32 = 1

    float64 = 2

    float16 = 3

    bfloat16 = 4

    int8 = 5

    uint8 = 6

    int16 = 7

    int32 = 8

    int64 = 9

class CollectiveKind(enum.Enum):
    all_reduce = 1

    reduce = 2

    reduce_scatter = 3

    all_gather = 4

    gather = 5

    broadcast = 6

    scatter = 7

    all_to_all = 8

    barrier = 9

class Collectives:
    """
    The collectives of a client (poseidon/collective.h). Each call starts and has a number.
    """

    def add(self, communicator: int, ranks: Sequence[int]) -> None: ...
    def start(
        self,
        communicator: int,
        kind: CollectiveKind,
        inputs: Sequence[_Array],
        outputs: Sequence[_Array],
        input_bytes: Sequence[int],
        output_bytes: Sequence[int],
        element: Element = Element.uint8,
        op: ReduceOp = ReduceOp.sum,
        divisor: int = 1,
        root: int = 0,
        label: int = 0,
        urgency: float = 0.5,
    ) -> int: ...
    def send(self, communicator: int, to: int, tag: int, label: int, data: _Array) -> int: ...
    def receive(self, communicator: int, source: int | None, tag: int, label: int, memory: _Array) -> int: ...
    def wait(self, call: int, limit_s: float | None = None) -> int | None: ...
    def done(self, call: int) -> bool: ...

class Arrays:
    """Contiguous CPU arrays, for start_all; keeps them alive."""

    def __init__(self, arrays: Sequence[_Array]) -> None: ...

class Client:
    """A worker's way into the exchange (include/poseidon/client.h)."""

    @staticmethod
    def connect(options: Options, store: object | None = None) -> Client: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def generation(self) -> int: ...
    @property
    def run(self) -> str: ...
    @property
    def joining(self) -> bool: ...
    @property
    def servers_save(self) -> bool: ...
    @property
    def collectives(self) -> Collectives: ...
    @property
    def c_exchange(self) -> int:
        """
        The address of the C interface for plugins (include/poseidon/c_exchange.h), valid as long as this object.
        """

    def add_look(self, address: int) -> int:
        """
        The number of the PoseidonLook at this address, which stays until remove_look.
        """

    def remove_look(self, number: int) -> None: ...
    def add_layers(self, layers: Sequence[Layer], transient: bool = False) -> tuple[int, Plan]: ...
    def start(self, layer: int, array: _Array, divisor: int, factor_count: int | None = None) -> None: ...
    def start_all(self, first_layer: int, arrays: Arrays, divisor: int) -> None: ...
    def push_pull(self, layer: int, array: _Array, destination: _Array, divisor: int) -> int: ...
    def push(self, layer: int, array: _Array, divisor: int) -> int: ...
    def pull(self, layer: int, destination: _Array, index: int = 0, exact: bool = False) -> int: ...
    def assign(self, layer: int, array: _Array, index: int = 0, update_count: int = 0) -> int: ...
    def restore(self, layer: int, destination: _Array, version_limit: int = 0) -> None: ...
    def set_rule(self, layer: int, rule: UpdateRule, compared: bool = True) -> None: ...
    def choose_chunk_bytes(self, known: int = 0) -> int: ...
    def start_absent(self, layer: int, array: _Array, divisor: int, counts: bool = True) -> None: ...
    def start_factors(
        self,
        layer: int,
        lefts: Sequence[_Array],
        rights: Sequence[_Array],
        destination: _Array | None,
        divisor: int,
        accumulate: bool = False,
    ) -> None: ...
    def start_rows(self, layer: int, indexes: _Array, values: _Array, divisor: int) -> None: ...
    def start_absent_rows(self, layer: int, divisor: int, counts: bool = True) -> None: ...
    def result_rows(self, arg: int, /) -> Any:
        """
        The indexes (int32; None: all rows) and values of a layer's result, as bytes that are valid until its next start.
        """

    def residual(self, layer: int) -> Any:
        """
        What a lossy scheme has not sent of a layer yet, as bytes that are valid until its next start; None: nothing.
        """

    def set_residual(self, layer: int, residual: _Array | None) -> None: ...
    def next_scheme(self, arg: int, /) -> str: ...
    def set_factor_count(self, arg0: int, arg1: int, /) -> None: ...
    def choose(self, layer: int, scheme: str, factor_count: float) -> None: ...
    def gathered(self, arg: int, /) -> list: ...
    def act_for(self, thread: int) -> None: ...
    def expect_other_threads(self) -> None: ...
    def wait_all(self) -> None: ...
    def wait(self, arg: int, /) -> None: ...
    def wait_operation(self, layer: int, number: int) -> None: ...
    def wait_range(self, first_layer: int, count: int) -> None: ...
    def done(self, arg: int, /) -> bool: ...
    def operation_done(self, arg0: int, arg1: int, /) -> bool: ...
    def set_priorities(
        self, first_layer: int, urgencies: Sequence[float], priority_classes: Sequence[int], priority_threshold: float
    ) -> None: ...
    @property
    def failure(self) -> Any: ...
    def notices(self) -> list[str]: ...
    def fresh_notices(self) -> list[str]: ...
    def behind(self) -> int:
        """
        How many further steps have been completed without this rank (stragglers=drop).
        """

    def straggler_report(self) -> list[LateRank]:
        """
        The ranks that have been late, as LateRank, by rank: this one, and those that the server of this process knows of.
        """

    def layer_stats(self, arg: int, /) -> LayerStats: ...
    def record_pushes(self, first: int, count: int) -> None:
        """
        Keeps how every layer's pushes from number `first` on go, which are LayerStats.step. What was kept before is forgotten. Any thread.
        """

    def recorded_pushes(self, layer: int) -> list[LayerStats]:
        """
        What is kept of a layer's pushes that have completed, in their order. Any thread.
        """

    def traffic(self) -> TrafficStats: ...
    def abort(self, reason: str, planned: bool = False) -> None: ...
    def shutdown(self, serves_on: bool = False) -> None: ...

class JobReport:
    """What a server knows of one job. Bytes are those on the network."""

    @property
    def name(self) -> str: ...
    @property
    def secret(self) -> int:
        """Which secret its workers know, from 1; 0 if the server has none."""

    @property
    def state(self) -> str:
        """running, or lost: it has no worker here, and may come back."""

    @property
    def generation(self) -> int: ...
    @property
    def worker_count(self) -> int: ...
    @property
    def connected_count(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def plain_bytes_received(self) -> int: ...
    @property
    def plain_bytes_sent(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def memory_limit_bytes(self) -> int: ...
    @property
    def open_chunk_count(self) -> int: ...
    @property
    def age_s(self) -> float: ...
    @property
    def silent_s(self) -> float: ...

class ServerReport:
    """What a server knows of all its jobs."""

    @property
    def jobs(self) -> list[JobReport]: ...
    @property
    def bytes_received(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def plain_bytes_received(self) -> int: ...
    @property
    def plain_bytes_sent(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def memory_limit_bytes(self) -> int: ...

class Server:
    """A shard host of the parameter server, standing alone."""

    @staticmethod
    def listen(options: Options, port: int = 0) -> Server: ...
    @property
    def address(self) -> str: ...
    def notices(self) -> list[str]: ...
    def report(self) -> ServerReport: ...
    def drain(self) -> None: ...
    def draining(self) -> bool: ...
    def drained(self) -> bool: ...
    def evict(self, job: str, secret: int) -> bool: ...
    def shutdown(self) -> None: ...

def container_memory_bytes(root: str = "") -> int | None:
    """
    The least limit of memory of the containers around this process (include/poseidon/machine.h).
    """

def container_processors(root: str = "") -> float | None:
    """
    How many processors their least quota is, maybe with a fraction (include/poseidon/machine.h).
    """

def scheduling_seconds(chunk_count: int, layer_count: int) -> float:
    """What scheduling so many chunks costs (include/poseidon/measure.h)."""

def multiply_adds_per_second() -> float:
    """
    The rate of one thread that multiplies factors (include/poseidon/measure.h).
    """

class Connection:
    """What the kernel knows of a TCP connection."""

    @property
    def id(self) -> int:
        """That no other open socket of this machine has."""

    @property
    def own_address(self) -> str: ...
    @property
    def peer_address(self) -> str: ...
    @property
    def acknowledged_bytes(self) -> int: ...
    @property
    def busy_us(self) -> int:
        """How long some bytes were not acknowledged yet."""

    @property
    def round_trip_us(self) -> int: ...
    @property
    def resent_packets(self) -> int: ...

def connections() -> list[Connection]:
    """The TCP connections that this library has in this process."""

def digest(array: _Array) -> int:
    """A number that stands for an array's bytes (include/poseidon/digest.h)."""

def coded_bytes(array: _Array, dtype: str) -> int:
    """
    The bytes of an array that is coded without loss, as numbers of `dtype` (include/poseidon/coded_size.h), or as
    'int8_blocks' (docs/wire-formats.md).
    """

def coded_difference_bytes(array: _Array, base: _Array, dtype: str) -> int:
    """The same of an array that is told to somebody who has `base`."""

class DropRule:
    """
    When servers end steps with stragglers=drop, for simulations (include/poseidon/drop_rule.h).
    """

    def __init__(self, worker_count: int, factor: float) -> None: ...
    def end_step(self, arrivals_ns: Sequence[int], waits_until_ns: int) -> int:
        """
        When the next step ends; arrivals by rank. Until waits_until_ns it ends for all ranks only.
        """

def properties() -> dict:
    """Name of each property of poseidon/features.def to its sentence."""

def feature_rows() -> list:
    """The features of poseidon/features.def, in their order, as dicts."""

def features_of(options: Options) -> list:
    """The names of the features that these options give."""

def refusal(needing: str, needs: str, needing_remedy: str, breaking: str, breaks: str, breaking_remedy: str) -> str:
    """
    Says that two features exclude each other: what users write for each, why it needs or breaks a property, and how to do without it.
    """
