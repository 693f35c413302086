"""Runs CUDA programs on the simulated accelerator, which is ``DeviceType.CUDA`` in their processes.

``stand_in``  when imported, makes ``torch.cuda`` and torch's CUDA half serve the simulated device
``table``     the meaning of each name of ``torch.cuda``, and the names that only CUDA has
``legacy``    tensor types such as ``torch.cuda.FloatTensor``
``nccl``      ``torch.distributed.ProcessGroupNCCL``
``visible``   the devices that a program chooses by ``CUDA_VISIBLE_DEVICES``

See Note [Two personalities] in sim/build.py.
"""
