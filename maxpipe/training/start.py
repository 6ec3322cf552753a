"""Take a loaded configuration to a finished run: start JAX, build the run, report, train."""

import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointMismatch, NoCheckpoint
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.mirror import open_mirror
from maxpipe.checkpoint.reader import Restored
from maxpipe.checkpoint.steps import NEWEST, followed
from maxpipe.config.catalog import ENGINES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.identity import Change, differing_keys, shape_refusals
from maxpipe.config.load import Loaded, resolve
from maxpipe.config.printing import notes
from maxpipe.config.sections import Config
from maxpipe.config.terminal import emit, folded, terminal_width
from maxpipe.data.fingerprint import DataFingerprint, fingerprint_data
from maxpipe.data.held_out import open_held_out
from maxpipe.data.loader import (
    make_loader,
    token_bytes,
    tokenizer_notes,
)
from maxpipe.devices import processes
from maxpipe.devices.agreement import check_agreement
from maxpipe.devices.chips import (
    device_memory,
    explain_quantisation,
)
from maxpipe.devices.cluster import job_of_process
from maxpipe.devices.mesh import build_mesh, num_slices, stage_meshes
from maxpipe.devices.simulated import explain_threads
from maxpipe.devices.start import start_jax
from maxpipe.devices.transfers import processes_of
from maxpipe.devices.xla_flags import advice
from maxpipe.plan.auto_stages import choose_stages
from maxpipe.supervise.failure import MemoryTooSmall, failing_fast
from maxpipe.supervise.process import RunLease, Supervision, own_run
from maxpipe.telemetry.console import ByteProgress
from maxpipe.telemetry.profiling import Profiler
from maxpipe.telemetry.prometheus import Prometheus, serving
from maxpipe.telemetry.recorder import Recorder
from maxpipe.telemetry.trackers import require_trackers
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.loop import DONE, Session, run_and_close, train
from maxpipe.training.phases import ERAS, begin_phase, first_position, peak_seconds
from maxpipe.training.resuming import (
    DOCUMENTS,
    FINGERPRINT,
    VERSIONS,
    check_continuity,
    continued,
    dated,
    followed_once,
    has_other_optimizer,
    package_versions,
    run_contents,
    step_to_continue,
    version_changes,
)
from maxpipe.training.run_directory import RunDirectory
from maxpipe.training.start_report import report
from maxpipe.training.state import TrainState
from maxpipe.training.trainer import BuildTrainer, StateT, Trainer


def launch(
    loaded: Loaded,
    supervision: Supervision,
    build_trainer: BuildTrainer,
    on_start: Callable[[Session], None] = lambda session: None,
) -> int:
    """Start JAX, fit the configuration to the devices, and train: the one way to start a run.

    Args:
      on_start: called with the `Session` before its first step, unless the run is finished.

    Returns:
      The exit code, see `maxpipe.train`.

    Raises:
      ConfigError: the configuration does not fit the devices, the data or the run directory.
    """
    start_jax(loaded.config)
    supervision.interruption.share_with_jax()
    with failing_fast(ends_process=supervision.owns_process), supervision.time:
        if processes.count() > 1:
            # Before anything else: with different programs a collective would never finish.
            check_agreement(loaded.config, run_contents(loaded.config))
        devices = jax.devices()
        given = loaded
        if loaded.config.mesh.elastic.axes:
            from maxpipe.training.elastic import compile_ahead, fit_hosts

            loaded = fit_hosts(loaded, supervision.progress)
        config = resolve(loaded, len(devices), num_slices(devices))
        with _owned(config) as lease, _serving(config) as prometheus:
            supervision = replace(supervision, lease=lease, prometheus=prometheus)

            def begin(session: Session) -> None:
                if config.mesh.elastic.axes:
                    compile_ahead(given, session, build_trainer, log)
                on_start(session)

            return run(config, loaded, build_mesh(config), supervision, build_trainer, begin)


def run(
    config: Config,
    loaded: Loaded,
    mesh: Mesh,
    supervision: Supervision,
    build_trainer: BuildTrainer,
    on_start: Callable[[Session], None],
) -> int:
    """Train a resolved configuration on a mesh, and return the exit code."""
    # 1. What is left to decide, and what the run's directory holds.
    device = mesh.devices.flat[0]
    emulated = explain_quantisation(config.model.quantisation, device)
    decisions = [*emulated, *advice(device, os.environ), *explain_threads(config)]
    note = decisions.append
    if jax.process_index() == 0:
        require_trackers(config.telemetry)
    if config.eval.prompts:
        from maxpipe.training.samples import check_samples

        check_samples(config)
    config = choose_stages(config, device_memory(mesh.devices.reshape(-1).tolist()), note)
    derived = differing_keys(config, loaded.config)
    directory, checkpointer = open_run_directory(config, derived, supervision.memory)
    mark = followed(config.checkpoint.resume, job_of_process())
    config = followed_once(config, checkpointer, job_of_process(), log)
    config = directory.config = dated(config, directory, note)
    if (last_step := finished_step(config, checkpointer)) is not None:
        checkpointer.close()  # copies to the mirror what an earlier process could not
        finished = f"step {last_step} is saved, and steps={config.steps}; nothing to do"
        log(f"{directory.root} is finished: {finished}")
        return DONE
    # 2. The trainer, and a state to go on from.
    explained = partial(explaining_memory, loaded.config, config, mesh)
    with explained():
        ready = None
        if config.mesh.elastic.axes:
            from maxpipe.training.elastic import build_with_step_ahead

            ready = build_with_step_ahead(config, mesh, build_trainer, note)
        trainer = ready or build_trainer(config, mesh, note=note)
        if supervision.memory is not None and config.checkpoint.replica_every:
            from maxpipe.checkpoint.replicas import reserve

            abstract = trainer.abstract_canonical()
            note(reserve(abstract, supervision.memory, config.checkpoint.replica_every))
        enter = partial(begin_phase, mesh, build_trainer)
        session = start_session(mesh, trainer, directory, checkpointer, supervision, enter)
    session.meta |= mark
    supervision.progress.tell(run=str(directory.root.resolve()))
    # 3. The report, and the steps.
    reasons = [*notes(config, loaded, verbose=loaded.verbose), *decisions]
    held_out = str(session.held_out) if session.held_out else ""
    for line in report(config, mesh, str(directory.root), session.step, held_out, reasons):
        log(line)
    if not (ready or config.compile.load):
        session.recorder.print_line("compiling   the first step, minutes for a large model")
    on_start(session)
    exit_code = run_and_close(session, explained()(partial(train, session)))
    seconds = sum(supervision.time.seconds().values())  # as the account of time adds up to
    log(_farewell(session, exit_code, directory.root, seconds))
    return exit_code


def log(text: str) -> None:
    """Print a line, on process 0 only."""
    if jax.process_index() == 0:
        emit(folded(text, terminal_width(sys.stdout)))


@contextmanager
def explaining_memory(written: Config, config: Config, mesh: Mesh) -> Iterator[None]:
    """Turn an error for lack of memory into `MemoryTooSmall`, with sizes and remedies."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        from maxpipe.training.out_of_memory import explanation

        if message := explanation(error, written, config, mesh):
            raise MemoryTooSmall(message) from None
        raise


@contextmanager
def _owned(config: Config) -> Iterator[RunLease]:
    with ExitStack() as stack:
        lease = RunLease()
        if jax.process_index() == 0:
            root, mirror = RunDirectory(config).root, open_mirror(config)
            lease = stack.enter_context(own_run(root, mirror, job_of_process(), log))
        processes.of_first_process(0)  # the others wait here until the run has its owner
        if not processes.share(RunDirectory(config).root):
            problem = f"not all processes see the same {RunDirectory(config).root}"
            remedy = "give a file system that they share, such as NFS"
            raise ConfigError(Problem("output_dir", f"{problem}: {remedy}"))
        yield lease


@contextmanager
def _serving(config: Config) -> Iterator[Prometheus]:
    host, port = config.telemetry.metrics_host, config.telemetry.metrics_port
    port = port if jax.process_index() == 0 else 0  # the process that records
    with serving(config.run_name, host, port) as prometheus:
        if port:
            log(f"metrics     http://{host}:{port}/metrics")
        yield prometheus


def open_run_directory(
    config: Config, derived: Collection[str], memory: Path | None
) -> tuple[RunDirectory, Checkpointer]:
    """Open the run's directory and its checkpoints, without writing to them.

    Args:
      derived: keys of the configuration that are derived from others.
      memory: directory of the replicas; None without a supervisor.
    """
    mirror = open_mirror(config)
    directory = RunDirectory(config, mirror, derived)
    replicas = None
    if every := config.checkpoint.replica_every:
        from maxpipe.checkpoint.replicas import KEY, NO_SUPERVISOR, Replicas

        if memory is None:
            raise ConfigError(Problem(KEY, NO_SUPERVISOR))
        replicas = Replicas(memory, directory.checkpoints, every)
    directory.check_owner()
    checkpointer = Checkpointer(
        directory.checkpoints, config.checkpoint, mirror=mirror, replicas=replicas, log=log
    )
    return directory, checkpointer


def finished_step(config: Config, checkpointer: Checkpointer) -> int | None:
    """Return the newest saved step if it ends the run and its record is sound, else None.

    A damaged step is left to the restore, which sets it aside and continues from the one before.
    """
    if config.checkpoint.resume not in NEWEST:
        return None
    step = processes.of_first_process(max(checkpointer.steps(), default=0))
    if step < config.steps:
        return None
    is_sound = True
    try:
        checkpointer.record(step, is_saved=True)
    except CheckpointDamaged as error:
        is_sound = False
        log(f"step {step} of steps={config.steps} is saved, but damaged: {error}")
    return step if processes.agree(is_sound) else None


def start_session(
    mesh: Mesh,
    trainer: Trainer,
    directory: RunDirectory,
    checkpointer: Checkpointer,
    supervision: Supervision,
    enter: Callable[..., None],
) -> Session:
    """Initialise the state or restore it from a checkpoint, and return what the loop works with.

    `trainer` is that of the whole batch; `enter`, a partial `begin_phase`, replaces it if need be.
    """
    config = directory.config
    place = BatchPlacer(mesh, trainer.batch_spec, config.data.global_batch_size)
    place_eval = BatchPlacer(mesh, trainer.batch_spec, config.eval.global_batch_size)
    loader = make_loader(config, "train", place.rows)
    held_out, by_source = open_held_out(config, place_eval.rows)
    for note in tokenizer_notes(config):
        log(f"data.tokenizer: {note}")
    fingerprint, versions = fingerprint_data(config), package_versions()
    resume_step = step_to_continue(config, checkpointer)
    step, skips, changed, eras = 0, 0, list[Change](), dict[str, object]()
    position = first_position(config, loader.num_documents)
    if resume_step is None:
        state = _first_state(trainer, directory)
    else:
        try:
            restored, changed = _restore(
                trainer, directory, checkpointer, resume_step, fingerprint, supervision
            )
        except NoCheckpoint as error:
            log(f"{error}, so the run starts again")
            loader.close()
            return start_session(mesh, trainer, directory, checkpointer, supervision, enter)
        meta, step, skips = restored.meta, restored.step, int(restored.state.skips)
        changed += version_changes(versions, meta.get(VERSIONS) or {})
        for change in changed:
            log(f"changed since step {step}: {change}")
        state = trainer.from_canonical(restored.state)
        if has_other_optimizer(changed):
            log("the state of the optimizer begins anew")
            state = trainer.restart_optimizer(state)
        position = continued(restored.iterator, config, loader.num_documents, meta)
        eras = {ERAS: meta[ERAS]} if ERAS in meta else eras
    newest = max(checkpointer.steps(), default=0)
    recorder = _build_recorder(mesh, directory, step, newest, supervision.prometheus)
    recorder.changes(step, changed)
    if jax.process_index() == 0:
        directory.keep_config(step)
    recorded = fingerprint.to_json() | {DOCUMENTS: loader.num_documents}
    session = Session(
        config=config,
        trainer=trainer,
        state=state,
        step=step,
        skips=skips,
        loader=loader,
        place=place,
        place_eval=place_eval,
        checkpointer=checkpointer,
        recorder=recorder,
        profiler=Profiler(
            config.telemetry.profile_steps,
            directory.root / "profile",
            steps_on_request=config.telemetry.trace_steps,
            take_request=supervision.interruption.take_trace_request,
            is_required=config.telemetry.required,
            print_line=recorder.print_line,
        ),
        meta={"config": asdict(config), VERSIONS: versions, FINGERPRINT: recorded, **eras},
        begin_phase=enter,
        supervision=supervision,
        held_out=held_out,
        held_out_by_source=by_source,
        token_bytes=token_bytes(config),
    )
    if resume_step is not None or len(position) < place.num_rows:
        enter(session, position)
    return session


def _first_state(trainer: Trainer[StateT], directory: RunDirectory) -> StateT:
    config, weights = directory.config, None
    if config.init_from:
        from maxpipe.training.initial_weights import open_weights, with_adapters, with_progress

        weights = open_weights(config)  # fit the model before anything is written
    if jax.process_index() == 0:
        directory.claim()
    state = trainer.init(jax.random.key(config.seed))
    if weights is None:
        log(f"weights     random, seed {config.seed}")
        return state
    for line in weights.describe():
        log(line)
    read = with_progress(weights, ByteProgress("init_from", weights.num_bytes, log))
    return trainer.replace_parameters(state, with_adapters(config, read))


def _restore(
    trainer: Trainer,
    directory: RunDirectory,
    checkpointer: Checkpointer,
    step: int,
    fingerprint: DataFingerprint,
    supervision: Supervision,
) -> tuple[Restored[TrainState], list[Change]]:
    """Return the newest sound checkpoint, or that of `step`, and what was changed since."""
    config, changed = directory.config, list[Change]()
    # A refusal should not cost the time of a restore; the restore itself deals with damage.
    with suppress(CheckpointDamaged):
        meta = checkpointer.record(step).meta
        changed = check_continuity(directory, fingerprint, meta, checkpointer.place)
    if jax.process_index() == 0:
        directory.claim(is_new=False)
    if config.init_from:
        log(f"init_from={config.init_from} is not read: the run continues from its checkpoint")
    exact_step = None if config.checkpoint.resume in NEWEST else step
    # Not read if the checkpoint has it in another form: the spike filter may be switched on or off.
    optional = ["history", *(["opt_state"] if has_other_optimizer(changed) else [])]
    try:
        with supervision.time.phase("restore"):
            restored = checkpointer.restore(trainer.abstract_canonical(), exact_step, optional)
    except CheckpointMismatch as error:
        place = str(directory.checkpoints)
        if problems := shape_refusals(changed, place):
            raise ConfigError(*problems, directory.advice(place)) from error
        raise
    # This may not be the step checked above, if that one was damaged.
    return restored, check_continuity(directory, fingerprint, restored.meta, checkpointer.place)


def _build_recorder(
    mesh: Mesh, directory: RunDirectory, step: int, newest: int, prometheus: Prometheus
) -> Recorder:
    config = directory.config
    one_program = ENGINES[config.pipeline.engine].one_program
    return Recorder(
        config,
        directory.root,
        start_step=step,
        keeps_later=newest > step,
        tokens_per_step=config.data.global_batch_size * config.data.sequence_length,
        peak_seconds=peak_seconds(config, mesh),
        is_main=jax.process_index() == 0,
        stage_processes=[] if one_program else list(map(processes_of, stage_meshes(mesh))),
        prometheus=prometheus,
    )


def _farewell(session: Session, exit_code: int, root: Path, seconds: float) -> str:
    step, last_step = session.step, session.config.steps
    if exit_code:
        saved_step = max(session.checkpointer.steps(), default=None)
        saved = "nothing is saved" if saved_step is None else f"step {saved_step} is saved"
        return f"stopped after step {step} of {last_step}, {saved} in {root}; exit code {exit_code}"
    if step < last_step:
        remedy = "the same command without it goes on"
        return f"stopped after step {step} of {last_step} (stop_after); {remedy}"
    curves = f"`python -m maxpipe.runs plot {shlex.quote(str(root))}` draws its curves"
    return f"done: {last_step} steps in {root}, {seconds:.0f} s for this start; {curves}"
