"""What the stages of a configured model hold and take, as text."""

from math import inf

from maxpipe.pipeline.auto_stages.plan import GIB, Prediction


def stages_text(chosen: Prediction, uniform: Prediction | None, limit: float | None) -> str:
    """A line for each stage, then the slowest one, and uniform stages if those are others.

    Args:
      chosen: what was drawn.
      uniform: what uniform stages would cost; None where the layers do not divide.
      limit: bytes that a device may use, infinite if unknown; None where memory was predicted for another engine.
    """
    lines = ["stages          times of one microbatch; the forward of a layer is 1"]
    for stage in range(chosen.run.table.num_stages):
        memory = "" if limit is None else f", {chosen.memory[stage] / GIB:.3g} GiB"
        lines.append(f"  {f'stage {stage}':<14}{_stage(chosen, stage)}{memory}")
    lines.append(f"slowest stage   {chosen.slowest:.4g}")
    if limit not in (None, inf):
        lines.append(f"limit           {limit / GIB:.3g} GiB a device")
    if uniform is None:
        chunks = chosen.run.table.num_chunks
        lines.append(f"uniform stages  none: {sum(chosen.sizes)} layers do not divide into {chunks} chunks")
    elif uniform.sizes != chosen.sizes:
        lines.append(f"uniform stages  {_against(uniform, chosen, limit)}")
    return "\n".join(lines) + "\n"


def _stage(prediction: Prediction, stage: int) -> str:
    table, times, layers = prediction.run.table, prediction.work, prediction.layers[stage]
    chunks = [str(n) for n, s in zip(prediction.sizes, table.stage_of_chunk, strict=True) if s == stage]
    noun = "layer" if chunks == ["1"] else "layers"
    text = f"{' + '.join(chunks)} {noun}: F {layers}, B {(times.layer - 1) * layers:.4g}"
    if table.lockstep:
        return f"{text}, head {times.head / table.num_stages:.4g}"
    return f"{text}, head {times.head:.4g}" if stage == table.stage_of_chunk[-1] else text


def _against(uniform: Prediction, chosen: Prediction, limit: float | None) -> str:
    run = uniform.run
    text = (
        f"{uniform.layers[0]} layers each: makespan {run.makespan:.6g} "
        f"({run.makespan / chosen.run.makespan - 1:+.1%}), bubble {run.bubble:.4g} ({run.bubble_fraction:.1%}), "
        f"slowest stage {uniform.slowest:.4g}"
    )
    if limit is None:
        return text
    most = uniform.memory.max()
    return f"{text}, {most / GIB:.3g} GiB{', which is too much' if most > limit else ''}"
