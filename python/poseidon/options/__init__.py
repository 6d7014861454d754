"""Every setting of Poseidon: one table, resolved in one place.

The value of an option is the first one given by: a keyword, the command line, the environment
(`POSEIDON_<NAME>`), the configuration file (`poseidon.toml` in the working directory, or the file
that `POSEIDON_CONFIG` names), the default. The commands of `poseidon` hand what their command line
says to the processes they start through the environment, so it also beats what was set there.

The rows are in include/poseidon/options.def; docs/options.md shows them. The secret itself (`secret`,
POSEIDON_SECRET) is no row: it has no flag and is in no configuration file.
"""

from poseidon.options.defaults import available_cpu_count
from poseidon.options.kinds import AUTO, parse_bytes
from poseidon.options.place import World
from poseidon.options.replica import between_replicas, within_replica
from poseidon.options.run_identity import fresh_run
from poseidon.options.settings import (
    Settings,
    check_environment,
    failure_mark,
    fresh_secret,
    is_given,
    resolve,
    resolve_option,
    resolve_with,
    to_environment,
)
from poseidon.options.slurm import hint_of_srun, refuse_without_srun
from poseidon.options.sources import FAILURE_MARK_VARIABLE
from poseidon.options.table import BASELINES_GROUP, BY_NAME, GROUPS, OPTIONS, PLACE, Group, Option
