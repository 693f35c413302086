"""Programs that say CUDA run on the simulated accelerator, which is ``DeviceType.CUDA`` in their processes.

``stand_in``  gives ``torch.cuda``, and what torch's CUDA half brings, to the simulated device; importing it does that
``table``     what each name of ``torch.cuda`` means, and what is CUDA's alone
``legacy``    ``torch.cuda.FloatTensor`` and its like
``nccl``      ``torch.distributed.ProcessGroupNCCL``
``visible``   which devices a program chooses by ``CUDA_VISIBLE_DEVICES``

See Note [Two personalities] in sim/build.py.
"""
