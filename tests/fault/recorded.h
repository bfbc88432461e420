/* What ranks really printed before they ended (Python 3.11, torch 2.13), paths shortened. */
#ifndef EVEN_TESTS_FAULT_RECORDED_H
#define EVEN_TESTS_FAULT_RECORDED_H

#define RECORDED_OWN_ERROR                                                                              \
  "step 3\n"                                                                                            \
  "Traceback (most recent call last):\n"                                                                \
  "  File \"/home/u/train.py\", line 41, in <module>\n"                                                 \
  "    main()\n"                                                                                        \
  "  File \"/home/u/train.py\", line 30, in main\n"                                                     \
  "    loss = F.cross_entropy(model(x), y)\n"                                                           \
  "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"                                                           \
  "  File \"/venv/lib/python3.11/site-packages/torch/nn/functional.py\", line 3504, in cross_entropy\n" \
  "    return torch._C._nn.cross_entropy_loss(\n"                                                       \
  "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"                                                       \
  "ValueError: Expected input batch_size (8) to match target batch_size (4).\n"

#define RECORDED_CHAIN                                                    \
  "Traceback (most recent call last):\n"                                  \
  "  File \"/home/u/train.py\", line 5, in read\n"                        \
  "    return table[key]\n"                                               \
  "KeyError: 'a'\n"                                                       \
  "\n"                                                                    \
  "During handling of the above exception, another exception occurred:\n" \
  "\n"                                                                    \
  "Traceback (most recent call last):\n"                                  \
  "  File \"/home/u/train.py\", line 9, in <module>\n"                    \
  "    read('a')\n"                                                       \
  "  File \"/home/u/train.py\", line 7, in read\n"                        \
  "    raise RuntimeError(\"no such table\\n(in two lines)\")\n"          \
  "RuntimeError: no such table\n"                                         \
  "(in two lines)\n"

#define RECORDED_DESTRUCTOR                                   \
  "Exception ignored in: <function Loader.__del__ at 0x7f>\n" \
  "Traceback (most recent call last):\n"                      \
  "  File \"/home/u/loader.py\", line 3, in __del__\n"        \
  "AttributeError: 'NoneType' object has no attribute 'close'\n"

#define RECORDED_SYNTAX                   \
  "  File \"/home/u/train.py\", line 2\n" \
  "    def f(:\n"                         \
  "          ^\n"                         \
  "SyntaxError: invalid syntax\n"

#define RECORDED_PEER                                                                                               \
  "[rank0]: Traceback (most recent call last):\n"                                                                   \
  "Traceback (most recent call last):\n"                                                                            \
  "  File \"/home/u/train.py\", line 12, in <module>\n"                                                             \
  "    dist.all_reduce(t)\n"                                                                                        \
  "  File \"/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py\", line 3032, in all_reduce\n" \
  "    work.wait()\n"                                                                                               \
  "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2345\n"

/* a server outside the job is down */
#define RECORDED_SERVER                                                        \
  "Traceback (most recent call last):\n"                                       \
  "  File \"/usr/lib/python3.11/urllib/request.py\", line 1348, in do_open\n"  \
  "    h.request(req.get_method(), req.selector, req.data, headers,\n"         \
  "  File \"/usr/lib/python3.11/socket.py\", line 836, in create_connection\n" \
  "    sock.connect(sa)\n"                                                     \
  "ConnectionRefusedError: [Errno 111] Connection refused\n"                   \
  "\n"                                                                         \
  "During handling of the above exception, another exception occurred:\n"      \
  "\n"                                                                         \
  "Traceback (most recent call last):\n"                                       \
  "  File \"/home/u/train.py\", line 20, in <module>\n"                        \
  "    urllib.request.urlopen(\"http://metrics:9/\", data)\n"                  \
  "  File \"/usr/lib/python3.11/urllib/request.py\", line 1351, in do_open\n"  \
  "    raise URLError(err)\n"                                                  \
  "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>\n"

/* the store of torch's process group: the system's words, from torch's code */
#define RECORDED_STORE                                                                                           \
  "Traceback (most recent call last):\n"                                                                         \
  "  File \"/home/u/train.py\", line 6, in <module>\n"                                                           \
  "    dist.barrier()\n"                                                                                         \
  "  File \"/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py\", line 4551, in barrier\n" \
  "    work = group.barrier(opts=opts)\n"                                                                        \
  "RuntimeError: Connection reset by peer\n"

#define RECORDED_INTERRUPT                             \
  "Traceback (most recent call last):\n"               \
  "  File \"/home/u/train.py\", line 9, in <module>\n" \
  "    model(x)\n"                                     \
  "KeyboardInterrupt\n"

#define RECORDED_TORCH_PREFIX                                   \
  "[rank1]: Traceback (most recent call last):\n"               \
  "[rank1]:   File \"/home/u/train.py\", line 8, in <module>\n" \
  "[rank1]:     raise ValueError('bad')\n"                      \
  "[rank1]: ValueError: bad\n"                                  \
  "[rank1]:[W1121 05:41:00.1 ProcessGroup.cpp:1] Warning: process group was not destroyed\n"

#define RECORDED_FATAL                                  \
  "Fatal Python error: Segmentation fault\n"            \
  "\n"                                                  \
  "Current thread 0x00007f (most recent call first):\n" \
  "  File \"/home/u/train.py\", line 3 in crash\n"

/* torch's wording for the group's shared memory: the process that went away is named */
#define RECORDED_LOST                                                                                              \
  "[rank0]: Traceback (most recent call last):\n"                                                                  \
  "[rank0]:   File \"/home/u/train.py\", line 13, in <module>\n"                                                   \
  "[rank0]:     loss.backward()\n"                                                                                 \
  "[rank0]:   File \"/venv/lib/python3.11/site-packages/evenstep/group.py\", line 60, in exchange\n"               \
  "[rank0]: evenstep.EvenstepError: rank 1 (process 77) died or came to its end; rank 0 was in all_gather of 200 " \
  "U8 elements in all (EVEN_ERR_PEER_LOST)\n"                                                                      \
  "[rank0]:   fix: the end of rank 1's own output says why\n"

#endif
