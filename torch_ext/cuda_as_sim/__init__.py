"""Programs that speak of CUDA run on the simulated accelerator: ``torch.cuda``, ``"cuda"`` and ``"nccl"`` mean it.

On builds of torch without GPUs the device is CUDA's, and ``stand_in`` completes what these builds lack, by ``table``.
On others, files are rewritten:

``words``    names of devices and backends in text
``rewrite``  the syntax tree of a file, see Note [What is rewritten]
``loader``   which files are rewritten, and how they are imported or compiled; ``ahead`` installs it in a zygote
``table``    what each name of ``torch.cuda`` means, and what is CUDA's alone; ``cuda`` looks names up in it
``methods``  ``Tensor.cuda()`` and its like
``visible``  which devices a program chooses by ``CUDA_VISIBLE_DEVICES``
``runtime``  what rewritten files import; it brings torch and the device

Only files that are asked for are rewritten. Torch itself is not, and goes on to see an accelerator that is not CUDA.
"""
