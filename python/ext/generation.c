/* _core.Generation and _core.agree: who is left of the job's ranks, and what they agree on. */
#include "ext.h"
#include "objects.h"

#include "fault/agree.h"
#include "fault/generation.h"
#include "fault/generation_sets.h"

typedef struct generation_object {
  PyObject_HEAD even_generation *generation;
} generation_object;

static even_generation *of(PyObject *self) {
  return ((generation_object *)self)->generation;
}

static PyObject *generation_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"fd", NULL};
  int fd = -1;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "i:Generation", keywords, &fd)) {
    return NULL;
  }
  generation_object *self = (generation_object *)even_ext_object_new(type);
  if (self == NULL) {
    return NULL;
  }
  even_status status = even_generation_open(fd, &self->generation);
  if (status != EVEN_OK) {
    Py_DECREF((PyObject *)self);
    return even_ext_raise(status);
  }
  return (PyObject *)self;
}

static void generation_dealloc(PyObject *self) {
  even_generation_close(of(self));
  even_ext_object_free(self);
}

/* Seconds -> nanoseconds, of what a caller that heeds signals asks for at once. */
static uint64_t nanoseconds(double seconds) {
  double most = 3600.0;
  seconds = seconds > most ? most : seconds;
  return seconds > 0 ? (uint64_t)(seconds * 1e9) : 0;
}

static PyObject *generation_wait(PyObject *self, PyObject *arguments) {
  unsigned int after = 0;
  double seconds = 0;
  uint32_t number = 0;
  if (!PyArg_ParseTuple(arguments, "Id:wait", &after, &seconds)) {
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS;
  number = even_generation_wait(of(self), after, nanoseconds(seconds));
  Py_END_ALLOW_THREADS;
  return PyLong_FromUnsignedLong(number);
}

static PyObject *generation_port(PyObject *self, PyObject *arguments) {
  unsigned int number = 0;
  double seconds = 0;
  uint32_t port = 0;
  char address[EVEN_GENERATION_ADDRESS];
  if (!PyArg_ParseTuple(arguments, "Id:port", &number, &seconds)) {
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS;
  port = even_generation_port(of(self), number, nanoseconds(seconds), address);
  Py_END_ALLOW_THREADS;
  return Py_BuildValue("sk", address, (unsigned long)port);
}

static PyObject *generation_meet(PyObject *self, PyObject *arguments) {
  unsigned int number = 0;
  unsigned int port = 0;
  if (!PyArg_ParseTuple(arguments, "II:meet", &number, &port)) {
    return NULL;
  }
  even_generation_meet(of(self), number, port);
  Py_RETURN_NONE;
}

static PyObject *generation_say(PyObject *self, PyObject *arguments) {
  int rank = 0;
  const char *why = NULL;
  if (!PyArg_ParseTuple(arguments, "is:say", &rank, &why)) {
    return NULL;
  }
  even_generation_say(of(self), rank, why);
  Py_RETURN_NONE;
}

static PyObject *generation_say_early(PyObject *self, PyObject *arguments) {
  int rank = 0;
  unsigned long long early = 0;
  if (!PyArg_ParseTuple(arguments, "iK:say_early", &rank, &early)) {
    return NULL;
  }
  even_generation_say_early(of(self), rank, early);
  Py_RETURN_NONE;
}

static PyObject *generation_has(PyObject *self, PyObject *arguments) {
  int rank = 0;
  unsigned int number = 0;
  if (!PyArg_ParseTuple(arguments, "iI:has", &rank, &number)) {
    return NULL;
  }
  return PyBool_FromLong(even_generation_has(of(self), rank, number));
}

static PyObject *generation_process(PyObject *self, PyObject *arguments) {
  int rank = 0;
  if (!PyArg_ParseTuple(arguments, "i:process", &rank)) {
    return NULL;
  }
  return PyLong_FromUnsignedLong(even_generation_process(of(self), rank));
}

static PyObject *generation_stand(PyObject *self, PyObject *arguments) {
  int rank = 0;
  unsigned int number = 0;
  if (!PyArg_ParseTuple(arguments, "iI:stand", &rank, &number)) {
    return NULL;
  }
  even_generation_stand(of(self), rank, number);
  Py_RETURN_NONE;
}

static PyObject *generation_doubt(PyObject *self, PyObject *arguments) {
  int rank = 0;
  unsigned int number = 0;
  if (!PyArg_ParseTuple(arguments, "iI:doubt", &rank, &number)) {
    return NULL;
  }
  even_generation_doubt(of(self), rank, number);
  Py_RETURN_NONE;
}

static PyObject *generation_offer(PyObject *self, PyObject *arguments) {
  int rank = 0;
  if (!PyArg_ParseTuple(arguments, "i:offer", &rank)) {
    return NULL;
  }
  even_generation_offer(of(self), rank);
  Py_RETURN_NONE;
}

static PyObject *generation_give(PyObject *self, PyObject *arguments) {
  int rank = 0;
  unsigned int number = 0;
  int fd = -1;
  if (!PyArg_ParseTuple(arguments, "iIi:give", &rank, &number, &fd)) {
    return NULL;
  }
  even_generation_give(of(self), rank, number, fd);
  Py_RETURN_NONE;
}

static PyObject *generation_given(PyObject *self, PyObject *arguments) {
  unsigned int number = 0;
  uint32_t process = 0;
  int fd = -1;
  if (!PyArg_ParseTuple(arguments, "I:given", &number)) {
    return NULL;
  }
  if (!even_generation_given(of(self), number, &process, &fd)) {
    Py_RETURN_NONE;
  }
  return Py_BuildValue("ki", (unsigned long)process, fd);
}

static PyObject *generation_gives_away(PyObject *self, PyObject *arguments) {
  int rank = 0;
  unsigned int number = 0;
  if (!PyArg_ParseTuple(arguments, "iI:gives_away", &rank, &number)) {
    return NULL;
  }
  return PyBool_FromLong(even_generation_gives_away(of(self), rank, number));
}

static PyObject *generation_ungiven(PyObject *self, PyObject *arguments) {
  unsigned int number = 0;
  char why[EVEN_GENERATION_WORDS];
  if (!PyArg_ParseTuple(arguments, "I:ungiven", &number)) {
    return NULL;
  }
  if (!even_generation_ungiven(of(self), number, why)) {
    Py_RETURN_NONE;
  }
  return PyUnicode_DecodeUTF8(why, (Py_ssize_t)strlen(why), "replace");
}

static PyObject *generation_fail_giving(PyObject *self, PyObject *arguments) {
  unsigned int number = 0;
  const char *why = NULL;
  if (!PyArg_ParseTuple(arguments, "Is:fail_giving", &number, &why)) {
    return NULL;
  }
  even_generation_fail_bringing(of(self), number, why);
  Py_RETURN_NONE;
}

static PyObject *generation_take(PyObject *self, PyObject *arguments) {
  int rank = 0;
  unsigned int number = 0;
  if (!PyArg_ParseTuple(arguments, "iI:take", &rank, &number)) {
    return NULL;
  }
  even_generation_take(of(self), rank, number);
  Py_RETURN_NONE;
}

/* Ranks of a set. */
typedef struct set_ranks {
  int *ranks; /* the caller's: PyMem_Free */
  size_t count;
} set_ranks;

/* false: with an exception. */
static bool read_ranks(PyObject *given, set_ranks *out) {
  PyObject *tuple = PySequence_Tuple(given);
  *out = (set_ranks){.ranks = NULL};
  if (tuple == NULL) {
    return false;
  }
  Py_ssize_t count = PyTuple_Size(tuple);
  out->ranks = PyMem_Calloc((size_t)count + 1, sizeof *out->ranks);
  if (out->ranks == NULL) {
    (void)PyErr_NoMemory();
  }
  for (Py_ssize_t i = 0; i < count && out->ranks != NULL; i++) {
    out->ranks[i] = (int)PyLong_AsLong(PyTuple_GetItem(tuple, i)); /* borrowed */
  }
  out->count = (size_t)count;
  Py_DECREF(tuple);
  if (PyErr_Occurred() != NULL) {
    PyMem_Free(out->ranks);
    out->ranks = NULL;
    return false;
  }
  return true;
}

static PyObject *generation_number_of(PyObject *self, PyObject *given) {
  set_ranks of_set;
  if (!read_ranks(given, &of_set)) {
    return NULL;
  }
  uint32_t number = even_generation_number_of(of(self), of_set.ranks, of_set.count);
  PyMem_Free(of_set.ranks);
  return PyLong_FromUnsignedLong(number);
}

static PyObject *generation_meet_at(PyObject *self, PyObject *arguments) {
  int rank = 0;
  unsigned int number = 0;
  unsigned int port = 0;
  if (!PyArg_ParseTuple(arguments, "iII:meet_at", &rank, &number, &port)) {
    return NULL;
  }
  even_generation_meet_at(of(self), rank, number, port);
  Py_RETURN_NONE;
}

static PyObject *generation_port_at(PyObject *self, PyObject *arguments) {
  int rank = 0;
  unsigned int number = 0;
  unsigned int seen = 0;
  double seconds = 0;
  uint32_t port = 0;
  if (!PyArg_ParseTuple(arguments, "iIId:port_at", &rank, &number, &seen, &seconds)) {
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS;
  port = even_generation_port_at(of(self), rank, number, seen, nanoseconds(seconds));
  Py_END_ALLOW_THREADS;
  return PyLong_FromUnsignedLong(port);
}

static PyObject *generation_train_apart(PyObject *self, PyObject *unused) {
  (void)unused;
  even_generation_train_apart(of(self));
  Py_RETURN_NONE;
}

static PyObject *generation_leave(PyObject *self, PyObject *arguments) {
  int rank = 0;
  if (!PyArg_ParseTuple(arguments, "i:leave", &rank)) {
    return NULL;
  }
  even_generation_leave(of(self), rank);
  Py_RETURN_NONE;
}

static PyObject *generation_left(PyObject *self, PyObject *arguments) {
  int rank = 0;
  if (!PyArg_ParseTuple(arguments, "i:left", &rank)) {
    return NULL;
  }
  return PyBool_FromLong(even_generation_left(of(self), rank));
}

/* Whom groups of one generation ask whether it is over. */
typedef struct over_mark {
  even_ext_over over;
  PyObject *object; /* the Generation */
  uint32_t number;
  set_ranks of_set; /* none: of all ranks */
} over_mark;

static bool is_over(void *context) {
  const over_mark *mark = context;
  const even_generation *generation = of(mark->object);
  uint32_t newest = mark->of_set.ranks == NULL
                        ? even_generation_number(generation)
                        : even_generation_number_of(generation, mark->of_set.ranks, mark->of_set.count);
  return newest > mark->number;
}

static void over_died(PyObject *capsule) {
  over_mark *mark = PyCapsule_GetPointer(capsule, EVEN_EXT_OVER);
  Py_DECREF(mark->object);
  PyMem_Free(mark->of_set.ranks);
  PyMem_Free(mark);
}

static PyObject *generation_over(PyObject *self, PyObject *arguments) {
  unsigned int number = 0;
  PyObject *ranks = NULL;
  set_ranks of_set = {.ranks = NULL};
  if (!PyArg_ParseTuple(arguments, "I|O:over", &number, &ranks) || (ranks != NULL && !read_ranks(ranks, &of_set))) {
    return NULL;
  }
  over_mark *mark = PyMem_Calloc(1, sizeof *mark);
  if (mark == NULL) {
    PyMem_Free(of_set.ranks);
    return PyErr_NoMemory();
  }
  *mark = (over_mark){.over = {.call = is_over, .context = mark}, .object = self, .number = number, .of_set = of_set};
  PyObject *capsule = PyCapsule_New(mark, EVEN_EXT_OVER, over_died);
  if (capsule == NULL) {
    PyMem_Free(of_set.ranks);
    PyMem_Free(mark);
    return NULL;
  }
  Py_INCREF(self);
  return capsule;
}

static PyObject *get_wished(PyObject *self, void *closure) {
  (void)closure;
  return PyLong_FromLong((long)even_generation_wished(of(self)));
}

static PyObject *get_number(PyObject *self, void *closure) {
  (void)closure;
  return PyLong_FromUnsignedLong(even_generation_number(of(self)));
}

static PyObject *get_refused(PyObject *self, void *closure) {
  (void)closure;
  return PyBool_FromLong(even_generation_refused(of(self)));
}

static PyObject *get_takes_in(PyObject *self, void *closure) {
  (void)closure;
  return PyBool_FromLong(even_generation_takes_in(of(self)));
}

static PyObject *get_ranks(PyObject *self, void *closure) {
  (void)closure;
  return PyLong_FromLong(even_generation_ranks(of(self)));
}

static PyGetSetDef members[] = {{"number", get_number, NULL, "of the newest generation", NULL},
                                {"refused", get_refused, NULL, "whether the agent has given the attempt up", NULL},
                                {"ranks", get_ranks, NULL, "that the job has places for", NULL},
                                {"takes_in", get_takes_in, NULL, "whether other processes may join", NULL},
                                {"wished", get_wished, NULL, "what the agent asks at the end of a step", NULL},
                                {NULL, NULL, NULL, NULL, NULL}};
static PyMethodDef methods[] = {
    {"wait", generation_wait, METH_VARARGS,
     "wait(after, seconds) -> the newest number, once it is newer or time is up"},
    {"has", generation_has, METH_VARARGS, "has(rank, number) -> whether it is a member of that generation"},
    {"say", generation_say, METH_VARARGS, "say(rank, why): it could go on without others (''), or why not"},
    {"say_early", generation_say_early, METH_VARARGS,
     "say_early(rank, early): before es.prepare, it is in a call of all ranks, of which it made early - 1 before; 0: "
     "it "
     "has come out of it"},
    {"meet", generation_meet, METH_VARARGS, "meet(number, port of this host): where those of this generation meet"},
    {"port", generation_port, METH_VARARGS,
     "port(number, seconds) -> (address, port) of that place, '' this host; ('', 0): not said, or it is over"},
    {"process", generation_process, METH_VARARGS, "process(rank) -> the process in its place; 0: none"},
    {"stand", generation_stand, METH_VARARGS, "stand(rank, number): it stands between two steps of that generation"},
    {"doubt", generation_doubt, METH_VARARGS,
     "doubt(rank, number): a call of it has failed in that generation, and it waits for a newer one"},
    {"offer", generation_offer, METH_VARARGS, "offer(rank): a process that is no member could be one"},
    {"give", generation_give, METH_VARARGS, "give(rank, number, fd): the state for those that are new in it"},
    {"over", generation_over, METH_VARARGS,
     "over(number, ranks=all) -> what tells a Comm (over=) that there is a newer generation, and the group is over"},
    {"number_of", generation_number_of, METH_O, "number_of(ranks) -> of the newest that concerns this set"},
    {"meet_at", generation_meet_at, METH_VARARGS,
     "meet_at(rank, number, port): where those of this rank's set meet in that generation"},
    {"port_at", generation_port_at, METH_VARARGS,
     "port_at(rank, number, seen, seconds) -> that port; 0: not said, or there is one after `seen`"},
    {"train_apart", generation_train_apart, METH_NOARGS, "train_apart(): the ranks train in sets"},
    {"leave", generation_leave, METH_VARARGS, "leave(rank): its process comes to its end by itself"},
    {"left", generation_left, METH_VARARGS, "left(rank) -> whether it has said so"},
    {"given", generation_given, METH_VARARGS, "given(number) -> (process, fd) of that state, or None"},
    {"gives_away", generation_gives_away, METH_VARARGS, "gives_away(rank, number) -> whether other hosts' need it"},
    {"fail_giving", generation_fail_giving, METH_VARARGS, "fail_giving(number, why): nobody of this host gives it"},
    {"ungiven", generation_ungiven, METH_VARARGS, "ungiven(number) -> why it does not come, or None"},
    {"take", generation_take, METH_VARARGS, "take(rank, number): a newcomer has opened it"},
    {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_new, (void *)generation_new},
                              {Py_tp_dealloc, (void *)generation_dealloc},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, members},
                              {Py_tp_doc, "Generation(fd): who is left of the job's ranks on this host. Any thread."},
                              {0, NULL}};
static PyType_Spec spec = {"evenstep._core.Generation", sizeof(generation_object), 0, Py_TPFLAGS_DEFAULT, slots};

static int read_positions(PyObject *list, even_position *positions, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; i++) {
    unsigned long long committed = 0;
    unsigned long long passes = 0;
    unsigned long long calls = 0;
    int stands = 0;
    int asks = 0;
    PyObject *one = PyList_GetItem(list, i); /* borrowed */
    if (one == NULL || !PyArg_ParseTuple(one, "KKKpp:agree", &committed, &passes, &calls, &stands, &asks)) {
      return -1;
    }
    positions[i] = (even_position){
        .committed = committed, .passes = passes, .calls = calls, .stands = stands != 0, .asks = asks != 0};
  }
  return 0;
}

static PyObject *agree(PyObject *module, PyObject *arguments) {
  PyObject *list = NULL;
  even_agreement agreed;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "O!:agree", &PyList_Type, &list)) {
    return NULL;
  }
  Py_ssize_t count = PyList_Size(list);
  even_position *positions = PyMem_Calloc((size_t)count + 1, sizeof *positions);
  if (positions == NULL) {
    return PyErr_NoMemory();
  }
  if (read_positions(list, positions, count) != 0) {
    PyMem_Free(positions);
    return NULL;
  }
  even_status status = even_agree(positions, (size_t)count, &agreed);
  PyMem_Free(positions);
  if (status != EVEN_OK) {
    return even_ext_raise(status);
  }
  return Py_BuildValue("KKKnN", (unsigned long long)agreed.committed, (unsigned long long)agreed.voids,
                       (unsigned long long)agreed.calls, (Py_ssize_t)agreed.giver, PyBool_FromLong(agreed.fails));
}

static PyMethodDef functions[] = {
    {"agree", agree, METH_VARARGS,
     "agree([(committed, void passes, calls, stands, asks), …]) -> (committed, voids, calls, giver, fails) "
     "of members at these positions"},
    {NULL, NULL, 0, NULL}};

int even_ext_add_generation(PyObject *module) {
  if (even_ext_add_type(module, "Generation", &spec) == NULL) {
    return -1;
  }
  return PyModule_AddFunctions(module, functions);
}
