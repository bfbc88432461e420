/* Where the elements of an array or tensor lie and what they are, asked of it in the cheapest way that it knows. */
#include "data.h"

#include "base/checked.h"
#include "base/fail.h"
#include "dlpack.h"

#include <evenstep/types.h>

/* ---- what elements are ---- */

/* A kind as in NumPy's type strings; 'B' is bfloat16, 'V' anything that is only moved. */
static void describe_elements(even_ext_data *out, char kind, size_t bytes) {
  static const struct {
    char kind;
    uint8_t bytes;
    uint8_t dtype;
    uint8_t reals;
  } known[] = {
      {'f', 4, EVEN_F32, 1},  {'f', 8, EVEN_F64, 1}, {'f', 2, EVEN_F16, 1},  {'B', 2, EVEN_BF16, 1},
      {'i', 8, EVEN_I64, 1},  {'i', 4, EVEN_I32, 1}, {'i', 2, EVEN_I16, 1},  {'i', 1, EVEN_I8, 1},
      {'u', 1, EVEN_U8, 1},   {'u', 2, EVEN_U16, 1}, {'u', 4, EVEN_U32, 1},  {'u', 8, EVEN_U64, 1},
      {'b', 1, EVEN_BOOL, 1}, {'c', 8, EVEN_F32, 2}, {'c', 16, EVEN_F64, 2},
  };
  out->element = bytes;
  out->dtype = -1;
  out->reals = 1;
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    if (known[i].kind == kind && known[i].bytes == bytes) {
      out->dtype = known[i].dtype;
      out->reals = known[i].reals;
    }
  }
}

static bool is_floating(int dtype) {
  return dtype == EVEN_F32 || dtype == EVEN_F64 || dtype == EVEN_F16 || dtype == EVEN_BF16;
}

bool even_ext_data_reducible(const even_ext_data *data, int op) {
  if (data->dtype < 0) {
    return false;
  }
  switch (op) {
    case EVEN_SUM:
      return true;
    case EVEN_AVG:
      return is_floating(data->dtype);
    case EVEN_PRODUCT:
    case EVEN_MIN:
    case EVEN_MAX:
      return data->reals == 1;
    default:
      return !is_floating(data->dtype);
  }
}

static int refuse(const char *what, const char *fix) {
  (void)even_fail(EVEN_ERR_ARGUMENT, "%s", what);
  (void)even_ext_raise(even_error_fix("%s", fix));
  return -1;
}

static int refuse_strides(void) {
  return refuse("the elements of the array do not lie one after the other",
                "pass a contiguous one: numpy.ascontiguousarray(x), x.contiguous()");
}

/* ---- DLPack ---- */

static bool is_contiguous(const dlpack_tensor *tensor) {
  int64_t expected = 1;
  for (int32_t i = tensor->dimensions - 1; tensor->strides != NULL && i >= 0; i--) {
    if (tensor->shape[i] != 1 && tensor->strides[i] != expected) {
      return false;
    }
    expected *= tensor->shape[i];
  }
  return true;
}

static char kind_of(uint8_t code) {
  static const char kinds[] = {'i', 'u', 'f', 'V', 'B', 'c', 'b'};
  return code < sizeof kinds ? kinds[code] : 'V';
}

static bool is_on_host(long device_type) {
  return device_type == DLPACK_CPU || device_type == DLPACK_CUDA_HOST || device_type == DLPACK_ROCM_HOST;
}

static int refuse_device(void) {
  return refuse("the tensor is not in this host's memory",
                "copy it to the CPU before the call: x.cpu(); tensors of GPUs go through torch.distributed: "
                "dist.init_process_group(\"evenstep\")");
}

static int read_tensor(const dlpack_tensor *tensor, even_ext_data *out) {
  size_t bits = (size_t)tensor->bits * tensor->lanes;
  size_t bytes = 0;
  if (!is_on_host(tensor->device_type)) {
    return refuse_device();
  }
  if (tensor->code == DLPACK_OPAQUE || bits % 8 != 0) {
    return refuse("the tensor's elements are no numbers of whole bytes", "convert it to a numeric dtype");
  }
  out->count = 1;
  for (int32_t i = 0; i < tensor->dimensions; i++) {
    if (tensor->shape[i] < 0 || !even_multiply_size(out->count, (size_t)tensor->shape[i], &out->count)) {
      return refuse("the tensor's shape is more than memory can hold", "check the shape");
    }
  }
  if (!even_multiply_size(out->count, bits / 8, &bytes)) {
    return refuse("the tensor's shape is more than memory can hold", "check the shape");
  }
  if (out->count > 0 && !is_contiguous(tensor)) {
    return refuse_strides();
  }
  describe_elements(out, kind_of(tensor->code), bits / 8);
  out->address = tensor->data == NULL ? NULL : (unsigned char *)tensor->data + tensor->byte_offset;
  return 0;
}

/* Whether a lazy flag says that the elements are others than those in memory: torch's conjugates and negatives. */
static int has_flag(PyObject *object, PyObject *method) {
  PyObject *result = PyObject_CallMethodObjArgs(object, method, NULL);
  int set = result == NULL ? -1 : PyObject_IsTrue(result);
  Py_XDECREF(result);
  return set;
}

static PyObject *name_of_conjugate; /* interned, made once */
static PyObject *name_of_negative;

static int refuse_lazy(void) {
  return refuse("the tensor is a lazy conjugate or negative: its elements are not those in memory",
                "pass x.resolve_conj().resolve_neg()");
}

static int check_flags(PyObject *object, const even_ext_data *data) {
  int conjugate = data->reals == 2 ? has_flag(object, name_of_conjugate) : 0;
  int negative = is_floating(data->dtype) && conjugate == 0 ? has_flag(object, name_of_negative) : 0;
  if (conjugate < 0 || negative < 0) {
    return -1;
  }
  return conjugate || negative ? refuse_lazy() : 0;
}

/* The last type seen with a table of functions, and the last without: programs use few. */
static struct {
  PyTypeObject *type; /* owned: its address cannot become another's */
  const dlpack_exchange *table;
  bool has_flags;
} latest;
static PyTypeObject *latest_without;

static void keep_type(PyTypeObject **place, PyTypeObject *type) {
  PyTypeObject *before = *place;
  Py_INCREF((PyObject *)type);
  *place = type;
  Py_XDECREF((PyObject *)before);
}

static const dlpack_exchange *table_of(PyTypeObject *type) {
  PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
  const dlpack_exchange *table = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_XDECREF(capsule); /* the table itself is static: so the standard has it */
  PyErr_Clear();
  while (table != NULL && table->major != DLPACK_MAJOR) {
    table = table->previous;
  }
  return table == NULL || table->tensor_from_object == NULL ? NULL : table;
}

static bool has_table(PyTypeObject *type) {
  if (type == latest.type || type == latest_without) {
    return type == latest.type;
  }
  const dlpack_exchange *table = table_of(type);
  if (table == NULL) {
    keep_type(&latest_without, type);
    return false;
  }
  keep_type(&latest.type, type);
  latest.table = table;
  latest.has_flags = PyObject_HasAttrString((PyObject *)type, "is_neg") != 0;
  return true;
}

/* After a raised BufferError or RuntimeError, which is how tensors say that they give no memory out: the same as our
 * own, with a fix. Any other exception stays. */
static int refuse_raised(PyObject *object) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  bool said = PyErr_GivenExceptionMatches(type, PyExc_BufferError) != 0 ||
              PyErr_GivenExceptionMatches(type, PyExc_RuntimeError) != 0;
  /* torch 2.6 raises for lazy conjugates, too */
  int conjugate = said && PyObject_HasAttrString(object, "is_conj") ? has_flag(object, name_of_conjugate) : 0;
  if (!said) {
    PyErr_Restore(type, value, trace);
    return -1;
  }
  PyErr_Clear(); /* one of is_conj */
  PyObject *text = value == NULL ? NULL : PyObject_Str(value);
  PyObject *bytes = text == NULL ? NULL : PyUnicode_AsUTF8String(text);
  const char *words = bytes == NULL ? NULL : PyBytes_AsString(bytes);
  PyErr_Clear(); /* of a text that has no bytes */
  if (conjugate > 0) {
    (void)refuse_lazy();
  } else {
    words = words == NULL ? "it does not say why" : words;
    (void)even_fail(EVEN_ERR_ARGUMENT, "the tensor gives no memory of this host out: %.*s", (int)strcspn(words, "\n"),
                    words);
    (void)even_ext_raise(even_error_fix("pass a dense tensor in the host's memory: x.cpu(), x.to_dense()"));
  }
  Py_XDECREF(bytes);
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return -1;
}

/* 1: read; 0: the type has no table; -1: an exception. */
static int open_by_table(PyObject *object, even_ext_data *out) {
  dlpack_tensor tensor;
  if (!has_table(Py_TYPE(object))) {
    return 0;
  }
  bool has_flags = latest.has_flags; /* what is called below may bring another type */
  if (latest.table->tensor_from_object(object, &tensor) != 0) {
    return refuse_raised(object);
  }
  if (read_tensor(&tensor, out) != 0) {
    return -1;
  }
  return has_flags && check_flags(object, out) != 0 ? -1 : 1;
}

static PyObject *call_dlpack(PyObject *object) {
  PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
  PyObject *nothing = method == NULL ? NULL : PyTuple_New(0);
  PyObject *names = nothing == NULL ? NULL : Py_BuildValue("{s(ii)}", "max_version", 1, 0);
  PyObject *capsule = names == NULL ? NULL : PyObject_Call(method, nothing, names);
  if (capsule == NULL && names != NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
    PyErr_Clear(); /* of before versions */
    capsule = PyObject_Call(method, nothing, NULL);
  }
  Py_XDECREF(names);
  Py_XDECREF(nothing);
  Py_XDECREF(method);
  return capsule;
}

/* What says that it is elsewhere is not asked for its memory: a device may have to be waited for. */
static int check_device(PyObject *object) {
  PyObject *place = PyObject_HasAttrString(object, "__dlpack_device__")
                        ? PyObject_CallMethod(object, "__dlpack_device__", NULL)
                        : NULL;
  PyObject *type = place == NULL ? NULL : PySequence_GetItem(place, 0);
  PyObject *whole = type == NULL ? NULL : PyNumber_Index(type); /* an enumeration's value, too */
  long number = whole == NULL ? DLPACK_CPU : PyLong_AsLong(whole);
  Py_XDECREF(whole);
  Py_XDECREF(type);
  Py_XDECREF(place);
  PyErr_Clear(); /* __dlpack__ will tell */
  return is_on_host(number) ? 0 : refuse_device();
}

/* The capsule keeps the memory and gives it back when it goes, since nobody takes the tensor out of it. */
static int open_by_capsule(PyObject *object, even_ext_data *out) {
  int failed = -1;
  if (check_device(object) != 0) {
    return -1;
  }
  PyObject *capsule = call_dlpack(object);
  if (capsule == NULL) {
    return refuse_raised(object);
  }
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    dlpack_managed_versioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    out->read_only = (managed->flags & DLPACK_READ_ONLY) != 0;
    failed = managed->major != DLPACK_MAJOR
                 ? refuse("the tensor speaks a DLPack of another major version than 1", "convert it to a NumPy array")
                 : read_tensor(&managed->tensor, out);
  } else {
    dlpack_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    failed = managed == NULL ? -1 : read_tensor(&managed->tensor, out);
  }
  if (failed != 0) {
    Py_DECREF(capsule);
    return -1;
  }
  out->keeper = capsule;
  return 0;
}

/* ---- NumPy's array interface, in C ---- */

/* PyArrayInterface, as NumPy's documentation gives it. */
typedef struct array_struct {
  int two;
  int dimensions;
  char kind;
  int element;
  int flags;
  Py_ssize_t *shape;
  Py_ssize_t *strides;
  void *data;
  PyObject *description;
} array_struct;

enum { ARRAY_CONTIGUOUS = 0x1, ARRAY_NATIVE_ORDER = 0x200, ARRAY_WRITABLE = 0x400 };

/* Whether a flag is set that an array keeps in one of its attributes, `otherwise` where there is none; -1: an
 * exception. */
static int is_set(PyObject *object, const char *attribute, const char *flag, int otherwise) {
  PyObject *holder = PyObject_GetAttrString(object, attribute);
  PyObject *value = holder == NULL ? NULL : PyObject_GetAttrString(holder, flag);
  int set = value == NULL ? -1 : PyObject_IsTrue(value);
  Py_XDECREF(value);
  Py_XDECREF(holder);
  if (set < 0 && PyErr_ExceptionMatches(PyExc_AttributeError)) {
    PyErr_Clear();
    return otherwise;
  }
  return set;
}

static bool lies_together(const array_struct *array) {
  Py_ssize_t expected = array->element;
  for (int i = array->dimensions - 1; i >= 0; i--) {
    if (array->shape[i] != 1 && array->strides[i] != expected) {
      return false;
    }
    expected *= array->shape[i];
  }
  return true;
}

/* Of an array whose elements have fields NumPy gives no flags at all (its interface clears them). */
static int read_structures(PyObject *object, const array_struct *array, even_ext_data *out) {
  int objects = is_set(object, "dtype", "hasobject", 0);
  int writable = is_set(object, "flags", "writeable", (array->flags & ARRAY_WRITABLE) != 0);
  if (objects < 0 || writable < 0) {
    return -1;
  }
  out->read_only = writable == 0;
  return objects ? refuse("the array's elements have fields that are Python objects", "leave these fields out") : 0;
}

static int read_array(PyObject *object, const array_struct *array, even_ext_data *out) {
  bool structures = array->two == 2 && array->kind == 'V';
  if (array->two != 2 || array->element < 0 || array->kind == '\0' || strchr("biufcmMSUV", array->kind) == NULL) {
    return refuse("the array's elements are Python objects, or lie elsewhere",
                  "convert it to a dtype of numbers or bytes");
  }
  out->count = 1;
  for (int i = 0; i < array->dimensions; i++) {
    out->count *= (size_t)array->shape[i]; /* of an array that exists: it fits */
  }
  if (out->count > 0 && (structures ? !lies_together(array) : (array->flags & ARRAY_CONTIGUOUS) == 0)) {
    return refuse_strides();
  }
  describe_elements(out, (array->flags & ARRAY_NATIVE_ORDER) == 0 ? 'V' : array->kind, (size_t)array->element);
  out->read_only = (array->flags & ARRAY_WRITABLE) == 0;
  out->address = array->data;
  if (structures) {
    return read_structures(object, array, out);
  }
  if (array->dimensions == 0 && !out->read_only) {
    /* Of one of NumPy's numbers this is a copy, and writable, which the number's own flags deny. */
    int writable = is_set(object, "flags", "writeable", 1);
    out->read_only = writable == 0;
    return writable < 0 ? -1 : 0;
  }
  return 0;
}

/* As open_by_table. */
static int open_by_array(PyObject *object, even_ext_data *out) {
  PyObject *capsule = PyObject_GetAttrString(object, "__array_struct__");
  if (capsule == NULL) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
      return -1;
    }
    PyErr_Clear();
    return 0;
  }
  const array_struct *array = PyCapsule_GetPointer(capsule, NULL);
  if (array == NULL || read_array(object, array, out) != 0) {
    Py_DECREF(capsule);
    return -1;
  }
  out->keeper = capsule;
  return 1;
}

/* ---- all of them ---- */

int even_ext_data_open(PyObject *object, even_ext_data *out) {
  memset(out, 0, sizeof *out);
  int found = open_by_table(object, out);
  if (found == 0) {
    found = open_by_array(object, out);
  }
  if (found != 0) {
    return found > 0 ? 0 : -1;
  }
  if (PyObject_HasAttrString(object, "__dlpack__")) {
    if (open_by_capsule(object, out) != 0) {
      return -1;
    }
    /* a torch from before the table */
    if (PyObject_HasAttrString(object, "is_neg") && check_flags(object, out) != 0) {
      even_ext_data_close(out);
      return -1;
    }
    return 0;
  }
  PyErr_Format(PyExc_TypeError, "%R has neither DLPack nor NumPy's array interface", (PyObject *)Py_TYPE(object));
  return -1;
}

void even_ext_data_close(even_ext_data *data) {
  Py_CLEAR(data->keeper);
}

static PyObject *data_of(PyObject *module, PyObject *object) {
  even_ext_data data;
  (void)module;
  if (even_ext_data_open(object, &data) != 0) {
    return NULL;
  }
  PyObject *keeper = data.keeper == NULL ? Py_None : data.keeper;
  PyObject *result =
      Py_BuildValue("(KnniiOO)", (unsigned long long)(uintptr_t)data.address, (Py_ssize_t)data.count,
                    (Py_ssize_t)data.element, data.dtype, data.reals, data.read_only ? Py_True : Py_False, keeper);
  even_ext_data_close(&data);
  return result;
}

static PyMethodDef functions[] = {
    {"data_of", data_of, METH_O,
     "data_of(array) -> (address, elements, bytes of one, dtype or -1, reals in one, read-only, keeper)"},
    {NULL, NULL, 0, NULL}};

int even_ext_add_data(PyObject *module) {
  name_of_conjugate = PyUnicode_InternFromString("is_conj");
  name_of_negative = PyUnicode_InternFromString("is_neg");
  if (name_of_conjugate == NULL || name_of_negative == NULL) {
    return -1;
  }
  return PyModule_AddFunctions(module, functions);
}
