# Owner(s): ["oncall: distributed"]
"""Stages: their descriptions of tensors, and pipelines of one rank that holds all
stages, which exchange no messages.
"""

import copy
import itertools
import sys
import warnings

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    pipe_split,
    pipeline,
)
from torch.distributed.pipelining._utils import (
    InferenceMode,
    PipeliningMetadataError,
    _derive_grad_metas,
    _DTensorMeta,
    _MeshCache,
    _StageMeta,
    _TensorMeta,
    extract_tensor_meta,
    extract_tensor_metas,
    flatten_args,
    to_local_if_dtensor,
    validate_and_normalize_to_tuple,
    validate_metadata,
    validate_static_arg_grad_correspondence,
    validate_tensors_metadata,
)
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    _split_tensor,
    merge_chunks,
)
from torch.distributed.pipelining.schedules import _ComputationType
from torch.distributed.pipelining.stage import _RecvInfo
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, get_devtype
from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

SINGLE = (ScheduleGPipe, Schedule1F1B)
WHOLE = (ScheduleLoopedBFS, ScheduleInterleaved1F1B)
SPLIT = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV)
WIDTH, MICROBATCHES = 4, 4


class MetadataTests(TestCase):
    def test_tensors_are_described_and_made(self):
        x = torch.zeros(3, 2, dtype=torch.float64).T.requires_grad_()
        meta = extract_tensor_meta(x)
        self.assertEqual(meta, _TensorMeta(x.shape, (1, 2), torch.float64, True))
        for one in (x, torch.zeros(2, dtype=torch.int32), x.detach()):
            made = extract_tensor_meta(one).to_tensor(x.device)
            self.assertEqual(extract_tensor_meta(made), extract_tensor_meta(one))
        (derived,) = _derive_grad_metas((meta,))
        self.assertEqual(derived, extract_tensor_meta(x.detach()))
        self.assertEqual(_derive_grad_metas((derived, meta)), (None, derived))
        other = extract_tensor_meta(torch.zeros(4))
        self.assertEqual(
            meta.get_diff(other),
            [
                f"shape mismatch: {x.shape} vs {torch.Size([4])}",
                "stride mismatch: (1, 2) vs (1,)",
                "dtype mismatch: torch.float64 vs torch.float32",
            ],
        )
        for same in (meta, derived):
            self.assertEqual(meta.get_diff(same), [])
        self.assertEqual(extract_tensor_metas((x, None), allow_none=True), (meta, None))
        self.assertIsNone(extract_tensor_metas(None))
        with self.assertRaisesRegex(PipeliningMetadataError, "None values are not"):
            extract_tensor_metas((x, None))

    def test_arguments_become_tuples_of_tensors(self):
        x = torch.ones(1, requires_grad=True)
        for given, expected in (
            (x, (x,)),
            ([x, x], (x, x)),
            ((x,), (x,)),
            (None, None),
        ):
            self.assertEqual(validate_and_normalize_to_tuple(given), expected)
        self.assertEqual(validate_and_normalize_to_tuple([x, None], True), (x, None))
        for given, allows, text in (
            ((x, None), False, r"arg\[1\] is None"),
            ((x, 3), True, r"arg\[1\] has type int"),
            ({"x": x}, False, "got dict"),
        ):
            with self.assertRaisesRegex(PipeliningMetadataError, text):
                validate_and_normalize_to_tuple(given, allows)
        self.assertEqual(flatten_args(({"a": x}, [3])), [x, 3])
        (again, flat) = flatten_args(((y := x * 2), [3, x.detach()]), detach=True)
        self.assertEqual(
            [y.detach(), 3, x.detach()],
            [each.detach() if each is flat[0] else each for each in flat],
        )
        self.assertIs(again[0], flat[0])
        self.assertEqual((flat[0].is_leaf, flat[0].requires_grad), (True, True))
        self.assertFalse(flat[2].requires_grad)
        self.assertTrue(to_local_if_dtensor(x) is x)
        self.assertFalse(to_local_if_dtensor(x, detach=True).requires_grad)

    def test_what_is_known_of_a_stage(self):
        metas = (extract_tensor_meta(torch.ones(1)),)
        names = "inputs", "outputs", "input_grads", "output_grads"
        self.assertFalse(_StageMeta().has_any())
        dtensor = (_DTensorMeta(*(getattr(metas[0], n) for n in metas[0].__slots__)),)
        for given in itertools.product((None, metas, dtensor), repeat=4):
            meta = _StageMeta(**dict(zip(names, given, strict=True)))
            self.assertEqual(meta.has_any(), any(given))
            self.assertEqual(
                meta.has_dtensors(), dtensor[0] in (given[0] or ()) + (given[1] or ())
            )
            is_complete = bool(given[0] and given[1])
            self.assertEqual(meta.is_complete_for_forward(), is_complete)
            for backward in (False, True):
                lacks = backward and meta.has_dtensors() and None in given
                found = InferenceMode.needs_dynamic(meta, backward)
                self.assertEqual(found, not is_complete or lacks, f"{given}")

    def test_meshes_are_kept(self):
        calls, key = [], (("tp",), None)

        def made(*arguments):
            calls.append(arguments)
            return "mesh" if arguments == key else None

        cache = _MeshCache(made)
        self.assertFalse(key in cache)
        self.assertEqual([cache.get_mesh(key) for _ in range(2)], ["mesh"] * 2)
        self.assertEqual((calls, len(cache), key in cache), ([key], 1, True))
        cache.put("other", "another")
        self.assertEqual((cache.get_mesh("other"), len(cache)), ("another", 2))
        with self.assertRaisesRegex(
            PipeliningMetadataError, "callback returned None for mesh_dim_names=0"
        ):
            cache.get_mesh((0, 1))
        self.assertEqual(len(cache), 2)
        with self.assertRaisesRegex(PipeliningMetadataError, "no get_mesh callback"):
            _MeshCache().get_mesh(key)

    def test_differences_are_raised_or_warned_of(self):
        x, y = torch.ones(2), torch.ones(3)
        one, other = map(extract_tensor_meta, (x, y))
        kind = _DTensorMeta(*(getattr(one, n) for n in one.__slots__))
        shape = f"shape mismatch: {y.shape} vs {x.shape}"
        for expected, actual, text in (
            ((one, None), (x, None), None),
            ((one, one), (x, one), None),
            ((one, other), (x, x), rf"here\[1\]:( Metadata mismatch.)? {shape}"),
            ((None,), (x,), r"here\[0\]: expected None, got metadata"),
            ((one,), (None,), r"here\[0\]: expected metadata, got None"),
            ((one,), (x, x), "here: expected 1 tensors, got 2"),
            (
                (kind,),
                (x,),
                r"here\[0\]:.* type: expected _DTensorMeta, got _TensorMeta",
            ),
        ):
            text = text and text.replace("([", r"\(\[").replace("])", r"\]\)")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                options = {"raise_on_mismatch": False}
                found = validate_tensors_metadata("here", expected, actual, **options)
                self.assertEqual(bool(found), text is not None, text)
                if text is None:
                    found = validate_tensors_metadata("here", expected, actual)
                    self.assertEqual(found, [])
                    continue
            with self.assertRaisesRegex(PipeliningMetadataError, text):
                validate_tensors_metadata("here", expected, actual)
            with self.assertWarnsRegex(UserWarning, text):
                options["warn_on_mismatch"] = True
                warned = validate_tensors_metadata("here", expected, actual, **options)
            self.assertEqual(warned, found)
        self.assertEqual(validate_metadata("here", other, x), other.get_diff(one))
        found = validate_tensors_metadata(
            "here", (other, other), (x, x), raise_on_mismatch=False
        )
        self.assertEqual(found, 2 * other.get_diff(one))

    def test_gradients_fit_to_arguments(self):
        x, y = torch.ones(1), torch.ones(1, requires_grad=True)
        for is_input, name in ((True, "input"), (False, "output")):
            check = validate_static_arg_grad_correspondence
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                check(3, (x, y), (None, x), is_input)
            for args, grads, text in (
                (
                    (x,),
                    (None, None),
                    rf"{name}_grads length \(2\) does not match {name}_args .*\(1\)",
                ),
                (
                    (y, x),
                    (x, x),
                    rf"{name}_args\[1\] has .*=False, but {name}_grads\[1\] is not",
                ),
            ):
                with self.assertRaisesRegex(
                    PipeliningMetadataError, "Stage 3: " + text
                ):
                    check(3, args, grads, is_input)
            with self.assertWarnsRegex(UserWarning, rf"{name}_grads\[0\] is None"):
                check(3, (y,), (None,), is_input)

    def test_inputs_are_shown(self):
        x = torch.ones(2)
        for info, text in (
            (
                _RecvInfo("a", None, None, None, is_root_arg=True),
                "input=a, root_arg=True",
            ),
            (
                _RecvInfo("b", 3, x, extract_tensor_meta(x)),
                f"input=b, source=3, shape={x.shape}, meta=_TensorMeta",
            ),
            (_RecvInfo("c", 3, None, None), "input=c, source=3, shape=None, meta=None"),
        ):
            self.assertEqual(repr(info), f"_RecvInfo({text})")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, factor=None):
        y = x + torch.tanh(self.linear(x))
        return y if factor is None else y * factor


def loss_of(output, target, scale=1.0):
    return scale * (output - target).square().mean()


def scaled_loss(output, target, *, scale):
    return loss_of(output, target, scale)


class OneRankTest(FSDPTest):
    @property
    def world_size(self):
        return 1

    def _layers(self, number):
        torch.manual_seed(0)
        layers = nn.ModuleList(Layer() for _ in range(number)).to(self.device)
        return layers, copy.deepcopy(layers)

    def _batch(self, step=0):
        torch.manual_seed(1 + step)
        return torch.randn(3, 2 * MICROBATCHES, WIDTH).to(self.device)

    def _stages(self, modules, **options):
        return [
            PipelineStage(module, index, len(modules), self.device, **options)
            for index, module in enumerate(modules)
        ]

    def _schedule(self, kind, stages, *args, **options):
        stages = stages[0] if kind in SINGLE else stages
        return kind(stages, MICROBATCHES, *args, **options)

    def _whole(self, layers, x, factor):
        for layer in layers:
            x = layer(x, factor)
        return x

    def _reference(self, layers, batch, scale):
        losses = []
        for x, factor, target in zip(
            *(each.chunk(MICROBATCHES) for each in batch), strict=True
        ):
            losses.append(loss_of(self._whole(layers, x, factor), target, scale))
            losses[-1].backward()
        return losses

    def _check(self, layers, reference, where, scale=1):
        for (name, one), other in zip(
            layers.named_parameters(), reference.parameters(), strict=True
        ):
            grad = one.grad
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            self.assertEqual(grad, scale * other.grad, f"{name}, {where}")

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_all_stages_on_one_rank(self):
        """Losses take further arguments, outputs are left away, tensors are checked."""
        wrappers = {
            "plain": lambda module: module,
            "ddp": DistributedDataParallel,
            "fsdp": fully_shard,
        }
        for kind, wrap in itertools.product((*SINGLE, *WHOLE, *SPLIT), wrappers):
            if wrap != "plain" and kind in SPLIT:
                continue
            layers, reference = self._layers(1 if kind in SINGLE else 2)
            syncs = []
            modules = [wrappers[wrap](each) for each in layers]
            for each in modules if wrap == "ddp" else ():
                each.register_comm_hook(syncs, self._counted)
            # In torch 2.13 a step that finds out shapes spoils the state of DDP.
            shape = self._batch()[0, :2].requires_grad_()
            given = {"input_args": shape, "output_args": shape} if wrap == "ddp" else {}
            stages = self._stages(modules, **given)
            for each in stages:
                each._runtime_validate = True  # as TORCH_DISTRIBUTED_DEBUG=DETAIL
            scales = kind is not ScheduleGPipe
            scale = {"loss_kwargs": {"scale": 2.0}}
            schedule = self._schedule(kind, stages, scaled_loss, scale_grads=scales)
            for step in range(2):
                where = f"{kind.__name__}, {wrap}, step {step}"
                batch, losses = self._batch(step), []
                options = {"losses": losses, **scale}
                options |= {"target": batch[2], "return_outputs": step == 1}
                found = schedule.step(batch[0], factor=batch[1], **options)
                wanted = self._reference(reference, batch, 2.0)
                self.assertEqual(losses, wanted, where)
                expected = self._whole(reference, *batch[:2]) if step else None
                self.assertEqual(found, expected, where)
                self._check(layers, reference, where, 1 / MICROBATCHES if scales else 1)
                if wrap == "ddp":  # once a stage, when its gradients are complete
                    sums = [
                        sum(each.grad.sum() for each in layer.parameters())
                        for layer in reversed(reference)
                    ]
                    self.assertEqual(syncs, sums, where)
                    syncs.clear()
                layers.zero_grad()
                reference.zero_grad()
                if kind in SINGLE:
                    with torch.no_grad():
                        found = schedule.eval(
                            *batch[:1], factor=batch[1], target=batch[2], **scale
                        )
                    self.assertEqual(found, self._whole(reference, *batch[:2]), where)

    @staticmethod
    def _counted(syncs, bucket):
        syncs.append(bucket.buffer().sum())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_gradients_of_weights_by_a_function(self):
        """``dw_builder`` returns a function for each microbatch, which completes it."""
        for kind in (*SINGLE, *WHOLE, *SPLIT):
            made, run = [], []

            def builder(made=made, run=run):
                made.append(len(made) + 1)
                return lambda index=made[-1]: run.append(index)

            layers, reference = self._layers(1 if kind in SINGLE else 2)
            stages = self._stages(layers, dw_builder=builder)
            schedule, batch = self._schedule(kind, stages, loss_of), self._batch()
            schedule.step(batch[0], factor=batch[1], target=batch[2])
            self._reference(reference, batch, 1.0)
            self._check(layers, reference, kind.__name__, 1 / MICROBATCHES)
            each_once = [*range(1, len(stages) * MICROBATCHES + 1)]
            self.assertEqual(
                (len(made), sorted(run)), (len(each_once), each_once), kind.__name__
            )
            self.assertEqual([each.dw_runner for each in stages], [{}] * len(stages))

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_functions_in_place_of_actions(self):
        layers, reference = self._layers(2)
        schedule = self._schedule(ScheduleLoopedBFS, self._stages(layers), loss_of)
        seen, losses, batch = [], [], self._batch()
        schedule.register_custom_function(
            _ComputationType.REDUCE_GRAD, lambda *arguments: seen.append(arguments)
        )
        schedule.step(batch[0], factor=batch[1], target=batch[2], losses=losses)
        self._reference(reference, batch, 1.0)
        self._check(layers, reference, "not divided, as nothing reduces")
        self.assertEqual(
            [str(action) for action, _ in seen], ["1REDUCE_GRAD", "0REDUCE_GRAD"]
        )
        for _, context in seen:
            self.assertIs(context.schedule_ref, schedule)
            self.assertIs(context.losses, losses)
            chunks = [each.chunk(MICROBATCHES) for each in batch]
            self.assertEqual(context.arg_mbs, [(each,) for each in chunks[0]])
            self.assertEqual(
                context.kwarg_mbs, [{"factor": each} for each in chunks[1]]
            )
            self.assertEqual(context.target_mbs, [*chunks[2]])

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_failures_name_stage_and_microbatch(self):
        class Fails(Layer):
            def forward(self, x, factor=None):
                if (x == 77).any():
                    raise ValueError("in the model")
                return super().forward(x, factor)

        layers, batch = nn.ModuleList([Fails(), Fails()]).to(self.device), self._batch()
        batch[0, -1] = 77
        shape = rf"args: .*Tensor\(torch.Size\(\[2, {WIDTH}\]\), grad=False"
        for kind in (ScheduleLoopedBFS, ScheduleGPipe):
            stages = self._stages(layers[: 1 if kind in SINGLE else 2])
            schedule = self._schedule(kind, stages, loss_of)
            logger = "torch.distributed.pipelining.schedules"
            check = self.assertLogs if kind is ScheduleLoopedBFS else self.assertNoLogs
            with check(logger, "ERROR") as logs:
                with self.assertRaisesRegex(
                    RuntimeError, r"\[Stage 0\] failed to run forward"
                ) as raised:
                    schedule.step(batch[0], factor=batch[1], target=batch[2])
            self.assertRegex(str(raised.exception), shape)
            self.assertRegex(str(raised.exception), "kwargs: .*factor.*Tensor")
            self.assertRegex(str(raised.exception.__cause__), "in the model")
            if logs:
                self.assertRegex(logs.output[0], "at step 5 when running action 0F3")
                self.assertRegex(logs.output[1], "Step 05: 0F3 +<-- ERROR HERE")

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_misuse_is_refused(self):
        layers, batch = self._layers(2)[0], self._batch()
        stages = self._stages(layers)
        schedule = self._schedule(ScheduleLoopedBFS, stages, loss_of)
        with self.assertRaisesRegex(
            PipeliningMetadataError, "Stage 1: loss_fn and target required"
        ):
            schedule.step(batch[0])
        stages = self._stages(layers)
        with self.assertRaisesRegex(RuntimeError, "before chunks have been configured"):
            stages[0]._check_chunk_id(0)
        with self.assertRaisesRegex(AssertionError, "doesn't have backward"):
            stages[1].get_local_bwd_output(0)
        with self.assertRaisesRegex(AssertionError, "doesn't have backward"):
            stages[0].set_local_bwd_input((), 0)
        with self.assertRaisesRegex(
            PipeliningMetadataError, "Stage 0: inference mode not set"
        ):
            stages[0]._prepare_forward_infra(1, ())
        for index, text in (
            (0, "got NoneType"),
            (
                1,
                "Expected _StageForwardMeta from same-rank .* got NoneType",
            ),
        ):
            with self.assertRaisesRegex(
                PipeliningMetadataError, f"Stage {index}: .*{text}"
            ):
                stages[index]._forward_metadata_inference(None)
        with self.assertRaisesRegex(
            PipeliningMetadataError, "forward metadata inference to run first"
        ):
            stages[0]._backward_metadata_inference()
        schedule = self._schedule(ScheduleLoopedBFS, stages, loss_of)
        schedule.step(batch[0], target=batch[2])
        with self.assertRaisesRegex(
            RuntimeError, r"Chunk id 4 is out of range \[0, 4\)"
        ):
            stages[0]._check_chunk_id(4)
        for call, text in (
            (lambda: stages[0].get_local_bwd_output(0), "if this stage is first"),
            (lambda: stages[1].set_local_bwd_input((), 0), "if this stage is last"),
            (
                lambda: stages[0].set_local_bwd_input([], 0),
                "Expected tuple, got .*list",
            ),
            (lambda: stages[0].set_local_bwd_input((3,), 0), "got .*int"),
            (lambda: stages[1].set_local_fwd_input((3,), 0), "got .*int"),
            (
                lambda: stages[0].set_local_fwd_input((batch[0],), 0),
                "on non-first stage",
            ),
            (
                lambda: stages[0].backward_weight_one_chunk(2),
                r"\[Stage 0\] .* for chunk 2",
            ),
        ):
            with self.assertRaisesRegex(AssertionError, text):
                call()
        stages[0].set_local_bwd_input((None,), 0)
        self.assertFalse(stages[0].grad_recv_info[0][0].buffer.any(), "zeros for none")
        with self.assertRaisesRegex(RuntimeError, "Unknown backward type: other"):
            stages[0].backward_maybe_with_nosync("other", {})
        with self.assertRaisesRegex(PipeliningMetadataError, "here: no metadata"):
            stages[0]._validate_stage_tensors("here", None, ())
        for each in stages:
            each._runtime_validate = True
        narrow = torch.zeros(2 * MICROBATCHES, 1, WIDTH, device=self.device)
        with self.assertRaisesRegex(
            PipeliningMetadataError, r"Stage 0 forward inputs\[0\]: shape mismatch"
        ):
            schedule.step(narrow, target=batch[2])
        with self.assertRaisesRegex(
            RuntimeError, "group size 1 cannot be larger than number of stages 0"
        ):
            PipelineStage(layers, -1, 0, self.device)
        with self.assertRaisesRegex(ValueError, "Stage index 2 is out of range of 2"):
            PipelineStage(layers, 2, 2, self.device)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_shapes_that_are_given(self):
        """Nothing runs to find them; where some are missing, wrong ones are refused."""
        (layers, reference), batch = self._layers(2), self._batch()
        runs = []
        for each in layers:
            each.register_forward_hook(lambda *_: runs.append(1))
        some = torch.empty(2, WIDTH, device=self.device)
        grads = some.clone().requires_grad_()
        for given, extra in (
            ({"input_args": some, "output_args": [grads]}, 0),
            (
                {
                    "input_args": (grads,),
                    "output_args": grads,
                    "input_grads": some,
                    "output_grads": (some,),
                },
                0,
            ),
            ({"input_args": some}, 2),
            ({"output_args": some, "output_grads": [some]}, 2),
        ):
            layers.zero_grad()
            reference.zero_grad()
            runs.clear()
            stages = [
                PipelineStage(layers[0], 0, 2, self.device, **given),
                PipelineStage(
                    layers[1],
                    1,
                    2,
                    self.device,
                    **given | ({"input_args": grads} if "input_args" in given else {}),
                ),
            ]
            schedule = self._schedule(ScheduleLoopedBFS, stages, loss_of)
            schedule.step(batch[0], factor=batch[1], target=batch[2])
            self.assertEqual(len(runs), 2 * MICROBATCHES + extra, f"{given.keys()}")
            self._reference(reference, batch, 1.0)
            self._check(layers, reference, f"{given.keys()}", 1 / MICROBATCHES)
        wrong = torch.empty(7, WIDTH, device=self.device)
        for name, label in (
            ("input_args", "input"),
            ("output_args", "output"),
            ("input_grads", "input_grad"),
            ("output_grads", "output_grad"),
        ):
            stages = [
                PipelineStage(layers[index % 2], index, 3, self.device, **options)
                for index, options in enumerate(({}, {name: wrong}, {}))
            ]
            schedule = self._schedule(ScheduleLoopedBFS, stages, loss_of)
            text = rf"Stage 1 {label}\[0\]: shape mismatch"
            with self.assertRaisesRegex(PipeliningMetadataError, text):
                schedule.step(batch[0], target=batch[2])
        stages = self._stages(layers, output_grads=(None,))
        schedule = self._schedule(ScheduleLoopedBFS, stages, loss_of)
        text = r"Stage 0 output_grad\[0\]: expected None, got metadata"
        with self.assertRaisesRegex(PipeliningMetadataError, text):
            schedule.step(batch[0], target=batch[2])

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_distributed_tensors_are_cut_joined_and_described(self):
        mesh = init_device_mesh(get_devtype().type, (1,), mesh_dim_names=("tp",))
        x = torch.arange(15.0, device=self.device).view(5, 3)
        whole = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        pieces = _split_tensor(whole, TensorChunkSpec(0), 2)
        self.assertEqual([each.shape[0] for each in pieces], [3, 2])
        for piece, rows in zip(pieces, x.tensor_split(2), strict=True):
            self.assertEqual(piece.placements, (Shard(0),))
            self.assertEqual(piece.to_local(), rows)
        joined = merge_chunks([[each] for each in pieces], [TensorChunkSpec(0)])[0]
        self.assertEqual((joined.placements, joined.shape), ((Shard(0),), x.shape))
        self.assertEqual(joined.to_local(), x)
        other = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        for mixed, text in (
            ([whole, x], "got a mix"),
            (
                [whole, other],
                "placement mismatch at chunk 1: expected .*Shard.*, got .*Replicate",
            ),
        ):
            with self.assertRaisesRegex(AssertionError, text):
                merge_chunks(mixed, TensorChunkSpec(0))
        meta = extract_tensor_meta(whole.requires_grad_())
        self.assertEqual(meta.mesh_cache_key, (("tp",), mesh._layout))
        made = meta.to_dtensor(self.device, mesh)
        self.assertEqual(extract_tensor_meta(made), meta)
        self.assertTrue(made.is_leaf and made.requires_grad)
        plain = _DTensorMeta.from_dtensor(other).to_dtensor(self.device, mesh)
        self.assertFalse(plain.requires_grad)
        with self.assertRaisesRegex(PipeliningMetadataError, "got DTensor"):
            _TensorMeta.from_tensor(whole)
        self.assertEqual(_derive_grad_metas((meta,)), (None,))
        self.assertEqual(meta.get_diff(meta), [])
        self.assertEqual(
            meta.get_diff(extract_tensor_meta(x)), ["type: _DTensorMeta vs _TensorMeta"]
        )
        nameless = init_device_mesh(get_devtype().type, (1, 1))
        far = DTensor.from_local(
            x[:2, :2], nameless, [Replicate()] * 2, run_check=False
        )
        found = [
            each.split(" mismatch")[0]
            for each in meta.get_diff(extract_tensor_meta(far))
        ]
        fields = "shape stride global_shape global_stride"
        fields += " placements mesh_dim_names mesh_layout"
        self.assertEqual(set(found) | {"stride", "global_stride"}, set(fields.split()))
        cache = _MeshCache()
        cache.update_from_tensors((whole, None, x, other))
        self.assertIs(cache.get_mesh(meta.mesh_cache_key), mesh)
        self.assertEqual(len(cache), 1)
        grad = whole.detach().requires_grad_()
        with self.assertRaisesRegex(
            PipeliningMetadataError, r"input_grads\[0\] is Tensor, expected DTensor"
        ):
            PipelineStage(
                nn.Identity(), 0, 1, self.device, input_args=grad, input_grads=x
            )
        with self.assertRaisesRegex(
            PipeliningMetadataError, r"output_grads length \(2\)"
        ):
            PipelineStage(
                nn.Identity(), 0, 1, self.device, output_args=grad, output_grads=(x, x)
            )
        self.assertEqual(to_local_if_dtensor(whole).shape, x.shape)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_values_that_skip_a_stage(self):
        """Schedules of several stages a rank refuse these, and name the stages."""

        class Skips(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(Layer() for _ in range(3))

            def forward(self, x):
                first = self.layers[0](x)
                pipe_split()
                second = self.layers[1](first)
                pipe_split()
                return self.layers[2](second) + first

        pipe = pipeline(Skips().to(self.device), (self._batch()[0][:2],))
        stages = [pipe.build_stage(index, self.device) for index in range(3)]
        schedule = ScheduleLoopedBFS(stages, MICROBATCHES)
        for each in stages:
            each._prepare_forward_infra(MICROBATCHES, (self._batch()[0][:2],))
        text = (
            r"stage 0 has forward send stages \[1, 2\] with non-adjacent stages \[2\]"
        )
        text += r" \(allowed adjacent stages: \[1\]\)"
        with self.assertRaisesRegex(RuntimeError, text):
            schedule._validate_adjacent_stage_communication()
        schedule._stages = stages[2:]
        text = (
            r"stage 2 has forward recv stages \[0, 1\] with non-adjacent stages \[0\]"
        )
        with self.assertRaisesRegex(RuntimeError, text):
            schedule._validate_adjacent_stage_communication()
        schedule._stages = stages[1:2]
        schedule._validate_adjacent_stage_communication()
        whole = [each._create_act_recv_info()[0].is_root_arg for each in stages]
        self.assertEqual(whole, [True, False, False])
        with self.assertRaisesRegex(
            PipeliningMetadataError, "Stage id of other not found"
        ):
            stages[0].get_stage_index_of_submod("other")
        found = [stages[0].get_stage_index_of_submod(each.name) for each in stages]
        self.assertEqual(found, [0, 1, 2])


if __name__ == "__main__":
    run_tests()
