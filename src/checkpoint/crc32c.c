/* CRC-32C (Castagnoli), half a byte at a time: the checksum of TensorFlow's files, which are read once. */
#include <evenstep/checkpoint.h>

uint32_t even_checkpoint_crc32c(const void *data, size_t bytes) {
  /* remainders of 0 … 15 by the reflected polynomial 0x82F63B78 */
  static const uint32_t remainders[16] = {0x00000000, 0x105EC76F, 0x20BD8EDE, 0x30E349B1, 0x417B1DBC, 0x5125DAD3,
                                          0x61C69362, 0x7198540D, 0x82F63B78, 0x92A8FC17, 0xA24BB5A6, 0xB21572C9,
                                          0xC38D26C4, 0xD3D3E1AB, 0xE330A81A, 0xF36E6F75};
  const unsigned char *at = data;
  uint32_t crc = ~UINT32_C(0);
  for (size_t i = 0; i < bytes; i++) {
    crc ^= at[i];
    crc = (crc >> 4) ^ remainders[crc & 15u];
    crc = (crc >> 4) ^ remainders[crc & 15u];
  }
  return ~crc;
}
