/* _core.encode and _core.decode_add: gradients that travel encoded (src/sync/encode.h). Memory crosses as addresses. */
#include "ext.h"

#include "base/alloc.h"
#include "sync/encode.h"

enum { INT8, ONE_BIT, TOP, KINDS };

/* Bytes of the payload; -1 with an exception where there is no such encoding. `number` is the seed, nothing, or how
 * many values are kept. */
static Py_ssize_t payload_bytes(int kind, Py_ssize_t count, unsigned long long number) {
  if (kind < 0 || kind >= KINDS || count < 1 || count > INT32_MAX ||
      (kind == TOP && (number < 1 || number > (unsigned long long)count))) {
    PyErr_Format(PyExc_ValueError, "no encoding %d of %zd values, %llu of them", kind, count, number);
    return -1;
  }
  size_t bytes = kind == INT8      ? even_int8_bytes((size_t)count)
                 : kind == ONE_BIT ? even_one_bit_bytes((size_t)count)
                                   : even_top_bytes((size_t)number);
  return (Py_ssize_t)bytes;
}

static PyObject *encoded_bytes(PyObject *module, PyObject *arguments) {
  int kind = 0;
  Py_ssize_t count = 0;
  unsigned long long number = 0;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "inK:encoded_bytes", &kind, &count, &number)) {
    return NULL;
  }
  Py_ssize_t bytes = payload_bytes(kind, count, number);
  return bytes < 0 ? NULL : PyLong_FromSsize_t(bytes);
}

static PyObject *encode(PyObject *module, PyObject *arguments) {
  int kind = 0;
  Py_ssize_t count = 0;
  unsigned long long number = 0;
  const float *values = NULL;
  void *payload = NULL;
  even_status status = EVEN_OK;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "iO&nKO&:encode", &kind, even_ext_to_address, &values, &count, &number,
                        even_ext_to_address, &payload) ||
      payload_bytes(kind, count, number) < 0) {
    return NULL;
  }
  unsigned char *scratch = NULL;
  Py_BEGIN_ALLOW_THREADS;
  if (kind == TOP) {
    status = EVEN_NEW_ARRAY(&scratch, even_top_scratch_bytes((size_t)count));
    if (status == EVEN_OK) {
      even_top_encode(values, (size_t)count, (size_t)number, payload, scratch);
      even_free(scratch);
    }
  } else if (kind == ONE_BIT) {
    even_encoders_best()->one_bit_encode(values, (size_t)count, payload);
  } else {
    even_encoders_best()->int8_encode(values, (size_t)count, number, payload);
  }
  Py_END_ALLOW_THREADS;
  return even_ext_done(status);
}

static PyObject *decode_add(PyObject *module, PyObject *arguments) {
  int kind = 0;
  Py_ssize_t count = 0;
  unsigned long long number = 0;
  float factor = 1;
  const void *payload = NULL;
  float *into = NULL;
  even_status status = EVEN_OK;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "iO&O&nKf:decode_add", &kind, even_ext_to_address, &payload, even_ext_to_address,
                        &into, &count, &number, &factor) ||
      payload_bytes(kind, count, number) < 0) {
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS;
  if (kind == TOP) {
    status = even_top_add(payload, (size_t)number, into, (size_t)count, factor);
  } else if (kind == ONE_BIT) {
    even_encoders_best()->one_bit_add(payload, into, (size_t)count, factor);
  } else {
    even_encoders_best()->int8_add(payload, into, (size_t)count, factor);
  }
  Py_END_ALLOW_THREADS;
  return even_ext_done(status);
}

static PyMethodDef methods[] = {
    {"encoded_bytes", encoded_bytes, METH_VARARGS,
     "encoded_bytes(kind, count, number): bytes of `count` values encoded as ENCODE_*; number: of top-k, those kept"},
    {"encode", encode, METH_VARARGS,
     "encode(kind, values, count, number, payload): fp32 at an address into its payload; number: int8's seed, or those "
     "kept"},
    {"decode_add", decode_add, METH_VARARGS,
     "decode_add(kind, payload, into, count, number, factor): into += factor * what was encoded, factor 1 or -1"},
    {NULL, NULL, 0, NULL}};

int even_ext_add_encode(PyObject *module) {
  if (PyModule_AddIntConstant(module, "ENCODE_INT8", INT8) != 0 ||
      PyModule_AddIntConstant(module, "ENCODE_ONE_BIT", ONE_BIT) != 0 ||
      PyModule_AddIntConstant(module, "ENCODE_TOP", TOP) != 0) {
    return -1;
  }
  return PyModule_AddFunctions(module, methods);
}
