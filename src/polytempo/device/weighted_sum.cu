// The weighted sum of up to 16 flat arrays, over a divisor, in one pass: into = (w0 x0 + w1 x1 + ...) / divisor.
// Terms are added in their order; numbers of two bytes are added up in four, and rounded once.
// `into` may be one of the terms. Compiled by NVRTC for compute_70 to weighted_sum.ptx, which any later GPU runs; its
// ".version" is lowered to 7.0, so that drivers of CUDA 11 load it.

struct Terms {
    const void *from[16];
    double weight[16];
    void *into;
    unsigned long long length;
    double divisor;
    int count;
};

struct half_t { unsigned short bits; };
struct bfloat_t { unsigned short bits; };

template <typename T> struct As { typedef T wide; };
template <> struct As<half_t> { typedef float wide; };
template <> struct As<bfloat_t> { typedef float wide; };

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(half_t x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ inline float widen(bfloat_t x) { return __uint_as_float((unsigned int)x.bits << 16); }

__device__ inline void narrow(float x, float *y) { *y = x; }
__device__ inline void narrow(double x, double *y) { *y = x; }
__device__ inline void narrow(float x, half_t *y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y->bits) : "f"(x)); }
__device__ inline void narrow(float x, bfloat_t *y) {
    unsigned int bits = __float_as_uint(x);
    bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    y->bits = is_nan ? 0x7fffu : (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T item[N]; };

template <typename T, int N> __device__ inline void sum(const Terms &t) {
    typedef typename As<T>::wide wide;
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long packs = t.length / N;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < packs; i += step) {
        wide total[N];
        for (int k = 0; k < t.count; ++k) {
            Pack<T, N> x = ((const Pack<T, N> *)t.from[k])[i];
            wide weight = (wide)t.weight[k];
#pragma unroll
            for (int j = 0; j < N; ++j) total[j] = k ? total[j] + weight * widen(x.item[j]) : weight * widen(x.item[j]);
        }
        Pack<T, N> y;
#pragma unroll
        for (int j = 0; j < N; ++j) narrow(total[j] / (wide)t.divisor, &y.item[j]);
        ((Pack<T, N> *)t.into)[i] = y;
    }
}

#define KERNELS(name, type, width) \
    extern "C" __global__ void name##_packed(Terms t) { sum<type, width>(t); } \
    extern "C" __global__ void name##_single(Terms t) { sum<type, 1>(t); }

KERNELS(float32, float, 4)
KERNELS(float64, double, 2)
KERNELS(float16, half_t, 8)
KERNELS(bfloat16, bfloat_t, 8)
